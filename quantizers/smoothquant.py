"""SmoothQuant: outliers of the inputs are moved into the weights, where a scale a row can carry them.

Xiao et al. 2022, arXiv 2211.10438: the inputs of channel j are divided by s_j = max|x_j|^α / max|w_j|^(1-α) and the
weights multiplied by it. The strength α is searched for each input. What the quantised linear loses is judged by two
terms: tr(E H Eᵀ) for the rounding error E of the weights, and Σ_j d_j ‖w_j‖² for that of the inputs, where d_j is the
squared rounding error that channel j of a recorded sample of inputs suffers (errors of different channels are all but
uncorrelated).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..calibration.statistics import Stats
from ..formats.errors import InputError
from ..formats.rounded import fake_quantize
from ..formats.scheme import Activation, Scheme
from . import folding
from .method import LiveFeed, Options, Source, Transformation
from .scales import choose


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
    x = _floored(_greatest(stats.abs_max, source))
    w = _floored(_greatest(torch.stack([weight.abs().amax(0) for weight in weights]).amax(0), source))
    trials: list[tuple[float | None, Tensor]] = [(None, torch.ones_like(x))]
    for step in range(1, options["grid"]):
        alpha = step / options["grid"]
        scale = x**alpha / w ** (1 - alpha)
        scale = scale / scale.log2().mean().exp2()
        trials.append((alpha, folding.power_of_two(scale) if exact else scale))
    losses = torch.stack([_loss(pairs, stats, folding.spread(scale, source), scale_dtype) for _, scale in trials])
    best = int(losses.nan_to_num(torch.inf).argmin())
    alpha, scale = trials[best]
    return scale, {"alpha": alpha, "error_before": float(losses[0]), "error_after": float(losses[best])}


def input_error(sample: Tensor, activation: Activation, abs_max: Tensor) -> Tensor:
    """Squared rounding error of each channel [in], summed over the rows of `sample` (float32 [rows, in])."""
    top = sample.abs().amax(-1, keepdim=True) if activation.dynamic else abs_max.amax().reshape(1, 1)
    step = (top / activation.grid.reach).clamp_(min=1e-30)
    return (activation.grid.decode(activation.grid.encode(sample / step)) * step - sample).square().sum(0)


def _loss(pairs: Sequence[tuple[Tensor, Scheme]], stats: Stats, scale: Tensor, scale_dtype: torch.dtype) -> Tensor:
    """Mean squared output error, summed over outputs, of rounding weights and inputs under `scale` [in]."""
    if stats.second_moment is None or stats.abs_max is None or stats.sample is None:
        raise ValueError("the statistics were checked before the search")
    total = torch.zeros((), device=scale.device)
    sample = stats.sample.float() / scale
    for weight, scheme in pairs:
        scaled = weight * scale
        error = fake_quantize(scaled, scheme, choose(scaled, scheme, "minmax", scale_dtype))
        error.div_(scale).sub_(weight)
        total += (error @ stats.second_moment).mul_(error).sum() / max(stats.tokens, 1)
        if scheme.activation is not None:
            lost = input_error(sample, scheme.activation, stats.abs_max / scale)
            total += (scaled.square_().sum(0) * lost).sum() / sample.shape[0]
    return total


def _greatest(values: Tensor, source: Source | None) -> Tensor:
    """Per source row the largest of `values` [in] over the input channels that read it."""
    if source is None or source.shared is None:
        return values
    rows = torch.zeros(source.weight.shape[0], dtype=values.dtype, device=values.device)
    return rows.scatter_reduce_(0, source.shared, values, "amax")


def _floored(values: Tensor) -> Tensor:
    return values.clamp(min=float(values.mean()) * 1e-3 + 1e-30)


def smoothquant(feed: LiveFeed, scale_dtype: torch.dtype, options: Options) -> dict[str, Any]:
    """Search the strength for one feed and fold it. A feed without a source or quantised readers is left alone.

    Option: `grid`, the number of steps from no strength to full.
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
    options={"grid": 20},
    rounding_options={"scale_rule": "mse"},
)
