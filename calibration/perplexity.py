"""Perplexity, and the distance to a reference: the only implementation in the project.

A window goes through the model, the last hidden states through the head (`heads.py`), and the scores of its targets
come back in one pass (`divergence.py`). What is kept of a window is three sums. The standard errors are those of a mean
over windows, which are nearly independent, where the tokens of one are not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..formats.errors import InputError
from ..formats.progress import Track, silent
from .divergence import Scores, score
from .heads import Head, head_of, hidden_states
from .protocols import Window
from .tokenizer import check_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class NotFinite(InputError):
    """The model gives logits that are NaN or infinite, so it has no perplexity."""


@dataclass(frozen=True)
class Mean:
    """A mean over windows and its standard error (None for a single window)."""

    value: float
    stderr: float | None


@dataclass(frozen=True)
class Measurement:
    """What a model scores on a text.

    `nll` and `kl` are in nats per scored token; `kl` is KL(reference‖model) over the whole vocabulary, `top1_agreement`
    the share of scored tokens where the reference's first choice is the model's. Both are None without a reference.
    `seconds` is the time from the first window to the last, both models included.
    """

    nll: Mean
    reference_nll: Mean | None
    kl: Mean | None
    top1_agreement: Mean | None
    tokens_scored: int
    windows: int
    seconds: float

    @property
    def perplexity(self) -> Mean | None:
        """exp(nll), its error by the delta method; None where it is larger than a float64 holds."""
        return _exp(self.nll)

    @property
    def reference_perplexity(self) -> Mean | None:
        """The reference's own perplexity on the same tokens."""
        return None if self.reference_nll is None else _exp(self.reference_nll)


@torch.inference_mode()
def evaluate(
    model: PreTrainedModel,
    windows: Sequence[Window],
    reference: PreTrainedModel | None = None,
    limit: int | None = None,
    track: Track = silent,
) -> Measurement:
    """Score the targets of the first `limit` windows (all for None) under `model`, and `reference` beside it.

    Computed in the models' dtype up to the last hidden state, in float32 (float64 for a float64 model) from there, with
    float64 sums. Leaves both models in evaluation mode. Raises InputError when there is nothing to score, an id is
    outside the vocabulary or the two vocabularies differ, and NotFinite, naming the window, when logits are not finite.
    """
    chosen = first(windows, limit)
    _check_vocabulary(chosen, model, reference)
    head = head_of(model.eval(), chosen[0].ids)
    other = None if reference is None else head_of(reference.eval(), chosen[0].ids)
    started = time.perf_counter()
    scores = [
        _totals(number, _score(model, head, window, reference, other))
        for number, window in enumerate(track(chosen, "evaluating", len(chosen)), start=1)
    ]
    return _measurement(chosen, scores, time.perf_counter() - started)


def first(windows: Sequence[Window], limit: int | None) -> Sequence[Window]:
    """The first `limit` windows, all for None. Raises InputError when that leaves none."""
    if limit is not None and limit < 1:
        raise InputError(f"--limit {limit}", "it leaves nothing to score", "use 1 or more")
    if not windows:
        raise InputError("windows", "there are none to score", "give more text")
    return windows[:limit]


def _score(
    model: PreTrainedModel, head: Head, window: Window, reference: PreTrainedModel | None, other: Head | None
) -> Scores:
    ids = window.ids.to(model.device).unsqueeze(0)
    rows = slice(ids.shape[1] - 1 - window.scored, ids.shape[1] - 1)
    pair = None
    if reference is not None and other is not None:
        pair = (other, hidden_states(reference, ids.to(reference.device))[rows].to(model.device))
    return score(head, hidden_states(model, ids)[rows], ids[0, -window.scored :], pair)


def _totals(number: int, scores: Scores) -> list[float]:
    """Means over one window's targets: nll, and with a reference its nll, KL, agreement."""
    fields = (scores.nll, scores.reference_nll, scores.kl, scores.agree)
    means = torch.stack([field.mean() for field in fields if field is not None]).tolist()
    for mean, who in zip(means, ("model", "reference", "model or the reference"), strict=False):
        if not math.isfinite(mean):
            raise NotFinite(
                f"window {number}", f"logits of the {who} are NaN or infinite", "check its weights with compress verify"
            )
    return means


def _measurement(windows: Sequence[Window], scores: list[list[float]], seconds: float) -> Measurement:
    columns = list(zip(*scores, strict=True))
    weights = [window.weight for window in windows]
    scored = [float(window.scored) for window in windows]
    paired = len(columns) > 1
    kl = _mean(columns[2], scored) if paired else None
    return Measurement(
        nll=_mean(columns[0], weights),
        reference_nll=_mean(columns[1], weights) if paired else None,
        kl=None if kl is None else Mean(max(kl.value, 0.0), kl.stderr),
        top1_agreement=_mean(columns[3], scored) if paired else None,
        tokens_scored=sum(window.scored for window in windows),
        windows=len(windows),
        seconds=seconds,
    )


def _mean(values: Sequence[float], weights: Sequence[float]) -> Mean:
    """Weighted mean and its standard error as a ratio of sums over windows (s/√n for equal weights)."""
    total, count = math.fsum(weights), len(values)
    mean = math.fsum(value * weight for value, weight in zip(values, weights, strict=True)) / total
    if count < 2:
        return Mean(mean, None)
    squares = math.fsum((weight * (value - mean)) ** 2 for value, weight in zip(values, weights, strict=True))
    return Mean(mean, math.sqrt(squares * count / (count - 1)) / total)


def _exp(nll: Mean) -> Mean | None:
    try:
        perplexity = math.exp(nll.value)
    except OverflowError:
        return None
    return Mean(perplexity, None if nll.stderr is None else perplexity * nll.stderr)


def _check_vocabulary(windows: Sequence[Window], model: PreTrainedModel, reference: PreTrainedModel | None) -> None:
    size = model.config.get_text_config().vocab_size
    other = size if reference is None else reference.config.get_text_config().vocab_size
    if other != size:
        raise InputError(
            "--reference",
            f"its vocabulary has {other:,} tokens, the model's {size:,}",
            "name the model that this one was made from",
        )
    check_ids((window.ids for window in windows), size)
