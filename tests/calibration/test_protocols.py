"""The table of protocols: which tokens are scored given which, worked out by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compress_llm.calibration.protocols import PROTOCOLS, WIKITEXT2_TEST, Bos, Protocol, protocol
from compress_llm.calibration.sources import Corpus, read_source
from compress_llm.calibration.tokenizer import load_tokenizer
from compress_llm.formats.errors import InputError

SHARED = Path("/work/shared/text/wikitext2-test.raw")
SMOLLM2 = Path("/work/models/smollm2")


def corpus(count: int) -> Corpus:
    return Corpus("c", "", [" ".join(f"w{index % 20}" for index in range(count))])


def cut(row: Protocol, tokenizer: object, count: int) -> list[tuple[list[int], int, float]]:
    """Windows as (word numbers with BOS as -3, scored, weight)."""
    windows = row.cut(corpus(count), tokenizer).windows
    return [((one.ids - 3).tolist(), one.scored, one.weight) for one in windows]


def plain(**settings: object) -> Protocol:
    return protocol("plain", **settings)


def test_plain_scores_all_but_the_first_token_of_each_window_and_keeps_the_tail(word_tokenizer: Callable) -> None:
    assert cut(plain(window=4), word_tokenizer(bos=True), 10) == [
        ([0, 1, 2, 3], 3, 3),
        ([4, 5, 6, 7], 3, 3),
        ([8, 9], 1, 1),
    ]
    assert len(cut(plain(window=4), word_tokenizer(), 9)) == 2


def test_a_stride_scores_only_new_tokens_each_once(word_tokenizer: Callable) -> None:
    assert cut(plain(window=4, stride=2), word_tokenizer(), 9) == [
        ([0, 1, 2, 3], 3, 3),
        ([2, 3, 4, 5], 2, 2),
        ([4, 5, 6, 7], 2, 2),
        ([6, 7, 8], 1, 1),
    ]


def test_once_is_what_the_tokenizer_adds_by_itself(word_tokenizer: Callable) -> None:
    assert cut(plain(window=4, bos="once"), word_tokenizer(bos=True), 6) == [([-3, 0, 1, 2], 3, 3), ([3, 4, 5], 2, 2)]
    record = plain(window=4, bos="once").cut(corpus(6), word_tokenizer()).record
    assert (record["bos"], record["bos_token_id"]) == ("once", None)


@pytest.mark.parametrize("bos", [True, False])
def test_window_puts_a_bos_in_front_of_each_inside_its_length(word_tokenizer: Callable, bos: bool) -> None:
    assert cut(plain(window=4, bos="window"), word_tokenizer(bos=bos), 7) == [
        ([-3, 0, 1, 2], 3, 3),
        ([-3, 3, 4, 5], 3, 3),
        ([-3, 6], 1, 1),
    ]
    assert cut(plain(window=4, stride=2, bos="window"), word_tokenizer(bos=bos), 5) == [
        ([-3, 0, 1, 2], 3, 3),
        ([-3, 2, 3, 4], 2, 2),
    ]


@pytest.mark.parametrize("bos", ["none", "window"])
@pytest.mark.parametrize("stride", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 10, 30, 31, 33])
def test_every_token_with_one_before_it_is_scored_once(count: int, stride: int, bos: Bos) -> None:
    row = plain(window=8, stride=stride, bos=bos)
    spans = list(row.spans(count, row))
    scored = [position for span in spans for position in range(span.stop - span.scored, span.stop)]
    unscored = [] if bos == "window" else [0] if stride < 8 else range(0, count, 8)
    assert scored == [position for position in range(count) if position not in unscored]
    assert all(span.stop - span.start + row.front <= 8 for span in spans)
    assert all(span.scored < span.stop - span.start + row.front for span in spans)


def test_wikitext2_drops_the_tail_and_scores_the_mean_over_predicted_tokens(word_tokenizer: Callable) -> None:
    row = replace(PROTOCOLS["wikitext2-2048"], window=4)
    assert cut(row, word_tokenizer(), 11) == [([0, 1, 2, 3], 3, 3), ([4, 5, 6, 7], 3, 3)]
    assert cut(row, word_tokenizer(bos=True), 7) == [([-3, 0, 1, 2], 3, 3), ([3, 4, 5, 6], 3, 3)]


def test_wikitext2_rows_are_joined_as_the_papers_do(word_tokenizer: Callable) -> None:
    lines = Corpus("c", "", [" = T = \n", " \n", "\n", " w1 \n"], "line")
    assert PROTOCOLS["wikitext2-2048"].text(lines) == (" = T = \n\n\n\n\n\n\n w1 \n", "\n\n")
    assert PROTOCOLS["plain"].text(lines) == (" = T = \n \n\n w1 \n", "")


def test_another_text_under_the_name_wikitext2_is_doubted(word_tokenizer: Callable) -> None:
    row = replace(PROTOCOLS["wikitext2-2048"], window=4)
    made = row.cut(corpus(20), word_tokenizer())
    assert "not WikiText-2's test split" in made.warnings[0]
    assert plain(window=4).cut(corpus(20), word_tokenizer()).warnings == ()


@pytest.mark.parametrize(("count", "tail"), [(9, True), (8, False)])
def test_hf_stride_follows_the_script_of_hqq(word_tokenizer: Callable, count: int, tail: bool) -> None:
    """begin = max(i + stride - length, 0); labels before the last `end - i` masked; mean loss times `end - i`."""
    row = protocol("hf-stride", window=4, stride=2, bos="none")
    expected = [
        ([0, 1], 1, 2),
        ([0, 1, 2, 3], 2, 2),
        ([2, 3, 4, 5], 2, 2),
        ([4, 5, 6, 7], 2, 2),
    ]
    assert cut(row, word_tokenizer(), count) == expected + ([([6, 7, 8], 1, 1)] if tail else [])
    assert sum(weight for _, _, weight in cut(row, word_tokenizer(), count)) == count


def test_hf_stride_has_its_own_numbers_and_fits_a_bos_in() -> None:
    row = protocol("hf-stride")
    assert (row.window, row.step, row.bos) == (1024, 512, "once")
    assert protocol("hf-stride", window=600).step == 512
    assert (protocol("hf-stride", longest=128).window, protocol("hf-stride", longest=128).step) == (128, 128)
    assert protocol("hf-stride", window=300).step == 300
    assert protocol("hf-stride", bos="window").front == 1


def test_hf_stride_windows_with_a_bos_are_no_longer_than_asked(word_tokenizer: Callable) -> None:
    row = protocol("hf-stride", window=4, stride=2, bos="window")
    assert cut(row, word_tokenizer(), 6) == [
        ([-3, 0, 1], 2, 2),
        ([-3, 1, 2, 3], 2, 2),
        ([-3, 3, 4, 5], 2, 2),
    ]


def test_llama_cpp_scores_the_second_half_behind_a_replaced_first_token(word_tokenizer: Callable) -> None:
    """Of 512 tokens, 257 … 511 are predicted; a tokenizer that adds a BOS gets it at the start of every chunk."""
    row = PROTOCOLS["llama.cpp-512"]
    for tokenizer, first in ((word_tokenizer(bos=True), 0), (word_tokenizer(), None)):
        made = row.cut(corpus(1100), tokenizer)
        assert [(len(one.ids), one.scored, one.weight) for one in made.windows] == [(512, 255, 255)] * 2
        assert made.record["bos"] == ("none" if first is None else "window")
        shift = 0 if first is None else 1
        second = made.windows[1].ids.tolist()
        assert second[0] == (first if first is not None else 3 + 512 % 20)
        assert second[1:] == [3 + (512 - shift + index) % 20 for index in range(1, 512)]


def test_llama_cpp_leaves_the_last_newline_out() -> None:
    assert PROTOCOLS["llama.cpp-512"].text(Corpus("c", "", ["a\n\n"]))[0] == "a\n"


def test_the_record_says_everything_that_moves_the_figure(word_tokenizer: Callable) -> None:
    record = plain(window=4, stride=3, bos="window").cut(corpus(9), word_tokenizer()).record
    assert {key: record[key] for key in ("name", "window", "stride", "bos", "bos_token_id", "tail", "context")} == {
        "name": "plain",
        "window": 4,
        "stride": 3,
        "bos": "window",
        "bos_token_id": 0,
        "tail": "scored",
        "context": 0,
    }
    assert (record["text_tokens"], record["join"]) == (9, "\n\n")
    other = plain(window=4).cut(Corpus("c", "", ["w0 w1 w3"]), word_tokenizer()).record
    assert record["text_sha256"] != other["text_sha256"]
    assert record["ids_sha256"] != other["ids_sha256"]


def test_too_short_a_text_is_refused(word_tokenizer: Callable) -> None:
    with pytest.raises(InputError, match="has 1 tokens, too few"):
        plain(window=4).cut(corpus(1), word_tokenizer())
    with pytest.raises(InputError, match="100 tokens, too few for one window of 2,048"):
        PROTOCOLS["wikitext2-2048"].cut(corpus(100), word_tokenizer())


def test_a_bos_that_does_not_exist_is_refused(word_tokenizer: Callable) -> None:
    with pytest.raises(InputError, match=r"--bos window.*no BOS token"):
        plain(window=4, bos="window").cut(corpus(9), word_tokenizer(has_bos=False))


REFUSED = {
    "--protocol wikitext": {"name": "wikitext"},
    "--window 1024: protocol wikitext2-2048 fixes it at 2048": {"name": "wikitext2-2048", "window": 1024},
    "--stride 5": {"name": "wikitext2-4096", "stride": 5},
    "--bos once: protocol llama.cpp-512 fixes it at window": {"name": "llama.cpp-512", "bos": "once"},
    "--window 1": {"name": "plain", "window": 1},
    "--window 0": {"name": "plain", "window": 0},
    "--stride 0": {"name": "plain", "stride": 0},
    "--stride 9: it must lie between 1 and the window, 8": {"name": "plain", "window": 8, "stride": 9},
    "--window 65: the model's context is 64 tokens": {"name": "plain", "window": 65, "longest": 64},
    "--protocol wikitext2-2048: the model's context is 64": {"name": "wikitext2-2048", "longest": 64},
}


@pytest.mark.parametrize("message", REFUSED)
def test_settings_that_cannot_be_are_refused(message: str) -> None:
    with pytest.raises(InputError) as error:
        protocol(**REFUSED[message])
    assert str(error.value).startswith(message)


def test_what_a_name_fixes_may_be_said_again() -> None:
    assert protocol("wikitext2-2048", window=2048, stride=2048, bos="none").bos == "none"


def test_a_default_window_shrinks_to_the_model() -> None:
    assert (plain(longest=64).window, plain(longest=64).step) == (64, 64)
    assert plain(longest=10**6).window == plain().window == 1024


@pytest.mark.skipif(not SHARED.is_file(), reason="WikiText-2 is not part of the project")
def test_wikitext2_is_the_text_of_the_papers() -> None:
    text, _ = PROTOCOLS["wikitext2-2048"].text(read_source(str(SHARED)))
    assert hashlib.sha256(text.encode()).hexdigest() == WIKITEXT2_TEST


@pytest.mark.skipif(not (SHARED.is_file() and SMOLLM2.is_dir()), reason="WikiText-2 and SmolLM2 are not here")
def test_wikitext2_has_as_many_tokens_as_others_count() -> None:
    made = PROTOCOLS["wikitext2-2048"].cut(read_source(str(SHARED)), load_tokenizer(SMOLLM2))
    assert made.record["text_tokens"] == 304_986
    assert len(made.windows) == 304_986 // 2048
    assert made.warnings == ()
    assert torch.equal(made.windows[0].ids, made.windows[0].ids.long())
