"""What an evaluation found: the report of `evaluate.py`, which `eval-ppl --json` prints field by field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ReferenceScore:
    """The reference's name and its own perplexity on the same tokens; both None without a reference."""

    name: str | None = None
    perplexity: float | None = None


@dataclass(frozen=True)
class Verdict:
    """What `--check` said; both None when it was not asked."""

    passed: bool | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Evaluation:
    """The result, field by field as `eval-ppl --json` prints it; what is not known is None.

    `nll` and `kl` are mean nats per scored token, `*_stderr` standard errors over windows, `tokens_per_second` scored
    tokens over the time of the whole pass, the reference's included. `protocol` says what the figures mean.
    """

    model: str
    perplexity: float | None
    perplexity_stderr: float | None
    nll: float
    nll_stderr: float | None
    kl: float | None
    kl_stderr: float | None
    top1_agreement: float | None
    tokens_scored: int
    windows: int
    protocol: Mapping[str, Any]
    limit: int | None
    dataset: Mapping[str, str]
    tokenizer_sha256: str
    reference: ReferenceScore
    check: Verdict
    tokens_per_second: float
    seconds: float
    peak_memory_bytes: int
    device: str
    dtype: str
    attention: str | None
    versions: Mapping[str, str]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
