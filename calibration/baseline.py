"""The gate of a CI job: a file with what a model scored, and the comparison of a later score with it.

A baseline fixes everything that makes two scores comparable: protocol, text, tokenizer, number of windows. A comparison
across any of them is refused and never made with a grain of salt. Only worse is a failure; better passes and is said.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..formats.durable import disk_faults, write_atomically
from ..formats.errors import InputError

VERSION = 1
DEFAULT_TOLERANCE = 0.01
# KL below this is rounding: a float32 evaluation on another machine moves it by as much.
KL_NOISE = 1e-6
# The original scores the same wherever it runs; a larger relative difference means that it is another model.
SAME_REFERENCE = 5e-3


@dataclass(frozen=True)
class Subject:
    """What a score is about. Two scores compare only when these are equal."""

    protocol: Mapping[str, Any]
    tokenizer_sha256: str
    windows: int


@dataclass(frozen=True)
class Score:
    """The figures: `perplexity` None where it overflows; `kl` and `reference_perplexity` None without a reference."""

    perplexity: float | None
    kl: float | None = None
    reference_perplexity: float | None = None


@dataclass(frozen=True)
class Baseline:
    """A score on file. `tolerance` is the relative loss that still passes; `about` is for people and never compared."""

    subject: Subject
    score: Score
    tolerance: float = DEFAULT_TOLERANCE
    about: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Check:
    """The verdict and, passed or not, one sentence with what moved and by how much."""

    passed: bool
    reason: str


def check_writable(file: Path) -> None:
    """Raise InputError when `file` cannot be written, before an evaluation is spent on it."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise InputError(f"--write-baseline {file}", f"{folder} is not a directory", "make it first")
    if (file.exists() and not file.is_file()) or not os.access(folder, os.W_OK):
        raise InputError(f"--write-baseline {file}", "no file can be written there", "choose another place")


def check_tolerance(tolerance: float) -> float:
    """The tolerance itself. Raises InputError unless it is a finite number of at least 0."""
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise InputError(f"--tolerance {tolerance}", "it must be at least 0", "use 0.01 for one per cent")
    return tolerance


def write_baseline(file: Path, baseline: Baseline) -> None:
    """Write `baseline` as JSON, whole or not at all; an older file is replaced. Raises InputError when it cannot be."""
    if baseline.score.perplexity is None:
        raise InputError(f"--write-baseline {file}", "the perplexity is too large for a number", "check the model")
    content = {"compress_baseline": VERSION, **asdict(baseline)}
    with disk_faults(f"--write-baseline {file}", kept=None):
        write_atomically(file, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def read_baseline(file: Path) -> Baseline:
    """The baseline in `file`. Raises InputError for anything that `write_baseline` did not write."""
    key, fix = f"--check {file}", "write it anew with --write-baseline"
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise InputError(key, f"it cannot be read ({error.strerror})", fix) from error
    except (ValueError, RecursionError) as error:
        raise InputError(key, f"it is not JSON ({error})", fix) from error
    if not isinstance(content, dict) or content.get("compress_baseline") != VERSION:
        raise InputError(key, f"it is not a baseline of version {VERSION}", fix)
    try:
        subject = Subject(**content["subject"])
        score = Score(**content["score"])
        tolerance = check_tolerance(float(content["tolerance"]))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(key, f"its fields are not those of a baseline ({error})", fix) from error
    numbers = [getattr(score, field.name) for field in fields(score)]
    if score.perplexity is None or not all(value is None or _is_number(value) for value in numbers):
        raise InputError(key, "its figures are not numbers", fix)
    if not isinstance(subject.protocol, dict):
        raise InputError(key, "its protocol is not an object", fix)
    return Baseline(subject, score, tolerance, content.get("about"))


def check_comparable(file: Path, baseline: Baseline, subject: Subject, has_reference: bool) -> None:
    """Raise InputError naming every difference that forbids to compare; needs no model, so it comes before the work."""
    differences = list(_differences(baseline.subject, subject))
    if differences:
        raise InputError(
            f"--check {file}",
            "it is of another evaluation: " + ", ".join(differences),
            "evaluate as it did, or write a new baseline",
        )
    if baseline.score.kl is not None and not has_reference:
        raise InputError(f"--check {file}", "it holds a KL, and there is no reference", "give --reference")


def judge(file: Path, baseline: Baseline, score: Score, tolerance: float | None = None) -> Check:
    """Compare `score` with a comparable baseline; `tolerance` None takes the file's.

    Fails when perplexity or KL is worse by more than the tolerance (relative). Raises InputError when the reference is
    evidently another model than the baseline's.
    """
    allowed = baseline.tolerance if tolerance is None else check_tolerance(tolerance)
    old = baseline.score
    if old.kl is not None and _moved(old.reference_perplexity, score.reference_perplexity) > SAME_REFERENCE:
        raise InputError(
            "--reference",
            f"its perplexity is {_shown(score.reference_perplexity)}, that of the baseline's reference "
            f"{_shown(old.reference_perplexity)}",
            f"name the model that {file} was made with",
        )
    verdicts = [_verdict("perplexity", old.perplexity, score.perplexity, allowed, 0.0)]
    if old.kl is not None:
        verdicts.append(_verdict("KL", old.kl, score.kl, allowed, KL_NOISE))
    return Check(all(passed for passed, _ in verdicts), "; ".join(text for _, text in verdicts))


def _verdict(name: str, old: float | None, new: float | None, allowed: float, noise: float) -> tuple[bool, str]:
    before = math.inf if old is None else old
    after = math.inf if new is None else new
    passed = after <= before * (1 + allowed) + noise
    moved = _moved(before, after)
    change = f"{moved * math.copysign(100, after - before):+.3g} %" if math.isfinite(moved) else "from zero"
    if after > before:
        word = "within tolerance" if passed else "WORSE"
    else:
        word = "improved" if after < before else "unchanged"
    return passed, f"{name} {word}: {_shown(old)} -> {_shown(new)} ({change}, allowed +{allowed * 100:.3g} %)"


def _moved(old: float | None, new: float | None) -> float:
    """|new - old| / old; infinite where one of them is not known or the old one is zero and the new one is not."""
    if old is None or new is None:
        return math.inf
    if old == new:
        return 0.0
    return math.inf if old == 0 else abs(new - old) / abs(old)


def _shown(value: float | None) -> str:
    return "overflow" if value is None else f"{value:.6g}"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _differences(old: Subject, new: Subject) -> Iterator[str]:
    for key in sorted({*old.protocol, *new.protocol}):
        before, after = old.protocol.get(key), new.protocol.get(key)
        if before != after:
            yield f"{key} is {after} here and {before} there"
    if old.tokenizer_sha256 != new.tokenizer_sha256:
        yield "the tokenizers differ"
    if old.windows != new.windows:
        yield f"{new.windows} windows are scored here and {old.windows} there (--limit)"
