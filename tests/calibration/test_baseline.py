"""The gate: worse fails, better passes and is said, other evaluations are never compared."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compress_llm.calibration.baseline import (
    Baseline,
    Score,
    Subject,
    check_comparable,
    check_tolerance,
    check_writable,
    judge,
    read_baseline,
    write_baseline,
)
from compress_llm.formats.errors import InputError

PROTOCOL = {"name": "plain", "window": 8, "stride": 8, "bos": "none", "text_sha256": "aa", "bos_token_id": None}
SUBJECT = Subject(PROTOCOL, "tok", 3)
FILE = Path("ppl-baseline.json")
WITH_KL = Baseline(SUBJECT, Score(20.0, 0.1, 19.0), 0.01)
WITHOUT = Baseline(SUBJECT, Score(20.0), 0.01)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    for baseline in (WITHOUT, replace(WITH_KL, about={"model": "m"})):
        write_baseline(file, baseline)
        assert read_baseline(file) == baseline
    assert [entry.name for entry in tmp_path.iterdir()] == ["b.json"]


@pytest.mark.parametrize(
    ("perplexity", "kl", "passed", "words"),
    [
        (20.0, 0.1, True, ["perplexity unchanged: 20 -> 20 (+0 %", "KL unchanged"]),
        (20.19, 0.1, True, ["perplexity within tolerance: 20 -> 20.19 (+0.95 %, allowed +1 %)"]),
        (20.21, 0.1, False, ["perplexity WORSE: 20 -> 20.21 (+1.05 %", "KL unchanged"]),
        (20.0, 0.102, False, ["perplexity unchanged", "KL WORSE: 0.1 -> 0.102 (+2 %"]),
        (19.0, 0.05, True, ["perplexity improved: 20 -> 19 (-5 %", "KL improved: 0.1 -> 0.05 (-50 %"]),
        (19.0, 0.2, False, ["perplexity improved", "KL WORSE"]),
        (None, 0.1, False, ["perplexity WORSE: 20 -> overflow"]),
    ],
)
def test_verdicts(perplexity: float | None, kl: float, passed: bool, words: list[str]) -> None:
    check = judge(FILE, WITH_KL, Score(perplexity, kl, 19.0))
    assert check.passed is passed
    assert all(word in check.reason for word in words), check.reason


def test_a_given_tolerance_replaces_the_files() -> None:
    score = Score(21.0, 0.1, 19.0)
    assert not judge(FILE, WITH_KL, score).passed
    assert judge(FILE, WITH_KL, score, tolerance=0.06).passed
    assert not judge(FILE, WITH_KL, Score(20.0001, 0.1, 19.0), tolerance=0.0).passed


def test_kl_counts_only_where_the_baseline_has_one() -> None:
    check = judge(FILE, WITHOUT, Score(20.0, 5.0, 19.0))
    assert check.passed
    assert "KL" not in check.reason


def test_rounding_of_a_vanishing_kl_is_no_regression() -> None:
    nothing = Baseline(SUBJECT, Score(20.0, 0.0, 20.0), 0.01)
    assert judge(FILE, nothing, Score(20.0, 5e-7, 20.0)).passed
    assert not judge(FILE, nothing, Score(20.0, 1e-3, 20.0)).passed


def test_another_reference_is_refused() -> None:
    with pytest.raises(InputError, match=r"--reference: its perplexity is 18, that of the baseline's reference 19"):
        judge(FILE, WITH_KL, Score(20.0, 0.1, 18.0))


@pytest.mark.parametrize(
    ("subject", "word"),
    [
        (replace(SUBJECT, protocol={**PROTOCOL, "name": "hf-stride"}), "name is hf-stride here and plain there"),
        (replace(SUBJECT, protocol={**PROTOCOL, "window": 16}), "window is 16 here and 8 there"),
        (replace(SUBJECT, protocol={**PROTOCOL, "bos": "once"}), "bos is once here and none there"),
        (replace(SUBJECT, protocol={**PROTOCOL, "text_sha256": "bb"}), "text_sha256 is bb here and aa there"),
        (replace(SUBJECT, tokenizer_sha256="other"), "the tokenizers differ"),
        (replace(SUBJECT, windows=2), "2 windows are scored here and 3 there (--limit)"),
    ],
)
def test_other_evaluations_are_not_compared(subject: Subject, word: str) -> None:
    with pytest.raises(InputError) as error:
        check_comparable(FILE, WITHOUT, subject, has_reference=False)
    assert word in str(error.value)


def test_equal_evaluations_are_compared() -> None:
    check_comparable(FILE, WITHOUT, SUBJECT, has_reference=False)
    check_comparable(FILE, WITHOUT, SUBJECT, has_reference=True)
    check_comparable(FILE, WITH_KL, SUBJECT, has_reference=True)
    with pytest.raises(InputError, match="give --reference"):
        check_comparable(FILE, WITH_KL, SUBJECT, has_reference=False)


def broken(**changes: Any) -> str:
    good = {"compress_baseline": 1, "subject": {"protocol": PROTOCOL, "tokenizer_sha256": "t", "windows": 1}}
    return json.dumps({**good, "score": {"perplexity": 2.0}, "tolerance": 0.1, **changes})


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("", "not JSON"),
        ("[]", "not a baseline of version 1"),
        (broken(compress_baseline=2), "not a baseline of version 1"),
        (broken(subject={}), "not those of a baseline"),
        (broken(subject={"protocol": 3, "tokenizer_sha256": "t", "windows": 1}), "protocol is not an object"),
        (broken(score={"perplexity": None}), "not numbers"),
        (broken(score={"perplexity": "2"}), "not numbers"),
        (broken(score={"perplexity": 2.0, "kl": float("nan")}), "not numbers"),
        (broken(score={"ppl": 2.0}), "not those of a baseline"),
        (broken(tolerance=-1), "at least 0"),
        (broken(tolerance="x"), "not those of a baseline"),
    ],
)
def test_files_that_are_no_baseline_are_refused(tmp_path: Path, content: str, cause: str) -> None:
    file = tmp_path / "b.json"
    file.write_text(content)
    with pytest.raises(InputError) as error:
        read_baseline(file)
    assert cause in str(error.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_baseline(tmp_path / "none.json")


def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    check_writable(tmp_path / "new.json")
    with pytest.raises(InputError, match="not a directory"):
        check_writable(tmp_path / "none" / "b.json")
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(InputError, match="no file can be written there"):
            check_writable(place)


@pytest.mark.parametrize("tolerance", [-0.1, float("nan"), float("inf")])
def test_tolerances_are_numbers_of_at_least_zero(tolerance: float) -> None:
    with pytest.raises(InputError, match="--tolerance"):
        check_tolerance(tolerance)


def test_a_score_without_a_number_makes_no_baseline(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="too large"):
        write_baseline(tmp_path / "b.json", Baseline(SUBJECT, Score(None)))
