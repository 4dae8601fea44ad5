"""SmoothQuant: outliers of the inputs are moved into the weights, where a scale a row can carry them.

Xiao et al. 2022, arXiv 2211.10438: the inputs of channel j are divided by s_j = max|x_j|^α / max|w_j|^(1-α) and the
weights multiplied by it. The strength α is searched for each input. What the quantised linear loses is judged by two
terms: tr(E H Eᵀ) for the rounding error E of the weights, and Σ_j d_j ‖w_j‖² for that of the inputs, where d_j is the
squared rounding error that channel j of a recorded sample of inputs suffers (errors of different channels are all but
uncorrelated). Where a rotation follows, both errors are those of the rotated basis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..calibration.statistics import Stats
from ..formats.errors import InputError
from ..formats.scheme import Activation, Scheme
from ..kernels.activations import quantize_activation
from ..kernels.hadamard import rotated
from . import folding
from .input_scales import input_scale
from .method import LiveFeed, Options, Source, Transformation
from .search import Weighted, best_scale, floored, rounding_loss


def needs_activation(scheme: Scheme) -> str | None:
    """Why a scheme gains nothing from smoothing, or None."""
    return None if scheme.activation is not None else "its inputs are not quantised"


def search_strength(
    weights: Sequence[Tensor],
    schemes: Sequence[Scheme],
    stats: Stats,
    scale_dtype: torch.dtype,
    options: Options,
    source: Source | None = None,
    *,
    exact: bool = False,
) -> tuple[Tensor, dict[str, Any]]:
    """The smoothing scale by source row (float32) that loses least, and how it was found; never worse than none.

    `exact` tries powers of two only. Raises InputError without the statistics: second moments, largest magnitudes and a
    sample of inputs.
    """
    if stats.second_moment is None or stats.abs_max is None or stats.sample is None:
        raise InputError("--method smoothquant", "needs calibration statistics", "give a --dataset")
    pairs = list(zip(weights, schemes, strict=True))
    trials = list(_candidates(weights, stats.abs_max, options["grid"], source))
    if exact:
        trials = [(alpha, folding.power_of_two(scale)) for alpha, scale in trials]
    hessian, sample, abs_max = stats.second_moment / max(stats.tokens, 1), stats.sample.float(), stats.abs_max

    def loss(some: Weighted, scale: Tensor) -> Tensor:
        columns = folding.spread(scale, source)
        total = torch.zeros((), device=scale.device)
        for weight, scheme in some:
            total += rounding_loss(weight, scheme, columns, scale_dtype, hessian)
            if scheme.activation is not None:
                moved = rotated(sample / columns, scheme)
                reach = abs_max / columns if scheme.rotation is None else moved.abs().amax(0)
                lost = input_error(moved, scheme.activation, reach) / sample.shape[0]
                total += (rotated(weight * columns, scheme).square_().sum(0) * lost).sum()
        return total

    scales = [scale for _, scale in trials]
    best, before, after = best_scale(pairs, scales, loss, options["rows"], options["finalists"])
    return scales[best], {"alpha": trials[best][0], "error_before": before, "error_after": after}


def _candidates(
    weights: Sequence[Tensor], abs_max: Tensor, grid: int, source: Source | None
) -> Iterator[tuple[float | None, Tensor]]:
    """Strengths and the scales they stand for, first of all no smoothing; α = 0 and 1 look at one side only."""
    x = floored(_greatest(abs_max, source))
    w = floored(_greatest(torch.stack([weight.abs().amax(0) for weight in weights]).amax(0), source))
    yield None, torch.ones_like(x)
    for step in range(1, grid):
        alpha = step / grid
        scale = x**alpha / w ** (1 - alpha)
        yield alpha, scale / scale.log2().mean().exp2()


def input_error(sample: Tensor, activation: Activation, abs_max: Tensor) -> Tensor:
    """Squared rounding error of each channel [in], summed over the rows of `sample` (float32 [rows, in])."""
    scale = input_scale(activation, abs_max, torch.float32)
    return (quantize_activation(sample, activation, scale) - sample).square_().sum(0)


def _greatest(values: Tensor, source: Source | None) -> Tensor:
    """Per source row the largest of `values` [in] over the input channels that read it."""
    if source is None or source.shared is None:
        return values
    rows = torch.zeros(source.weight.shape[0], dtype=values.dtype, device=values.device)
    return rows.scatter_reduce_(0, source.shared, values, "amax")


def smoothquant(feed: LiveFeed, scale_dtype: torch.dtype, options: Options) -> dict[str, Any]:
    """Search the strength for one feed and fold it. A feed without a source or quantised readers is left alone.

    Options: `grid`, the number of steps from no strength to full; `rows` and `finalists`, see `best_scale`.
    """
    quantised = [(target.weight.float(), target.scheme) for target in feed.targets if target.scheme is not None]
    if feed.source is None or not quantised:
        return {"source": None, "alpha": None}
    weights, schemes = zip(*quantised, strict=True)
    kept = len(quantised) < len(feed.targets)
    scale, record = search_strength(weights, schemes, feed.stats, scale_dtype, options, feed.source, exact=kept)
    if record["alpha"] is not None:
        folding.apply(feed, scale, scale_dtype)
    return {"source": feed.source.name, **record}


SMOOTHQUANT = Transformation(
    "smoothquant",
    smoothquant,
    needs=frozenset({"second_moment", "abs_max", "sample"}),
    misfit=needs_activation,
    options={"grid": 20, "rows": 64, "finalists": 4},
)
