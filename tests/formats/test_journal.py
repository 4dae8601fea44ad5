"""A journal goes on exactly where it was, with exactly the run it was of, or says why not."""

import re

import pytest

from compress_llm.formats.errors import InputError
from compress_llm.formats.journal import JOURNAL, Entry, Journal

IDENTITY = {
    "source_sha256": "ab",
    "recipe": {"scheme": "W4A16", "groups": (64, 32)},
    "versions": {"torch": "2.13"},
    "threads": 2,
}


def test_resume_finds_what_was_recorded(tmp_path):
    journal = Journal.open(tmp_path, IDENTITY, resume=False)
    journal.record(0, {"a": "00"}, {"error": 0.1 + 0.2, "layers": []})
    journal.record(10, {"b": "11"}, {})
    again = Journal.open(tmp_path, IDENTITY, resume=True)
    assert again.completed == {0: Entry({"a": "00"}, {"error": 0.1 + 0.2, "layers": []}), 10: Entry({"b": "11"}, {})}
    again.record(0, {"a": "22"}, {})
    assert Journal.open(tmp_path, IDENTITY, resume=True).completed[0].hashes == {"a": "22"}


def test_nothing_to_resume_starts_afresh(tmp_path):
    assert Journal.open(tmp_path, IDENTITY, resume=True).completed == {}
    Journal.open(tmp_path, IDENTITY, resume=True).record(0, {}, {})
    assert Journal.open(tmp_path, IDENTITY, resume=False).completed == {}
    assert Journal.open(tmp_path, IDENTITY, resume=True).completed == {}


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"threads": 4}, "threads was 2 in the run to resume and is 4 now"),
        ({"versions": {"torch": "2.14"}}, "versions.torch was '2.13' in the run to resume and is '2.14' now"),
        ({"recipe": {"scheme": "W8A16", "groups": [64, 32]}}, "recipe.scheme was 'W4A16'"),
        ({"recipe": {}}, "recipe"),
        ({"seed": 1}, "seed was None in the run to resume and is 1 now"),
    ],
)
def test_another_run_may_not_go_on(tmp_path, change, cause):
    Journal.open(tmp_path, IDENTITY, resume=False)
    with pytest.raises(InputError, match=re.escape(cause)):
        Journal.open(tmp_path, {**IDENTITY, **change}, resume=True)


def test_damage_is_found_at_every_byte(tmp_path):
    Journal.open(tmp_path, IDENTITY, resume=False).record(3, {"t": "ff"}, {"error": 0.125})
    whole = (tmp_path / JOURNAL).read_bytes()
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        for damaged in (bytes(flipped), whole[:place]):
            (tmp_path / JOURNAL).write_bytes(damaged)
            with pytest.raises(InputError, match="damaged"):
                Journal.open(tmp_path, IDENTITY, resume=True)


def test_a_damaged_journal_does_not_stop_a_fresh_start(tmp_path):
    (tmp_path / JOURNAL).write_bytes(b"\0")
    assert Journal.open(tmp_path, IDENTITY, resume=False).completed == {}


def test_nan_has_no_place_in_a_journal(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        Journal.open(tmp_path, IDENTITY, resume=False).record(0, {}, {"error": float("nan")})
