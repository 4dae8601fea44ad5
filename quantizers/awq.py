"""AWQ: input channels that matter are scaled up before rounding, and what feeds them is scaled down.

Lin et al. 2023, arXiv 2306.00978. The scale of a channel is a power of how large its inputs are, in the duo form also
of how large its weights are not, and the exponent is searched on a grid. The output error of a linear is
tr(E H Eᵀ) for the weight error E and the second moment H of its inputs, so the search needs no forward pass; the
weights of all linears that read one input are judged together. Clipping, the paper's second search, is the scale rule
`local-hessian` of the rounding that follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..calibration.factor import left_over
from ..calibration.statistics import Stats
from ..formats.errors import InputError
from ..formats.scheme import Scheme
from . import folding
from .method import LiveFeed, Options, Source, Transformation
from .search import Weighted, best_scale, floored, rounding_loss

Candidate = tuple[dict[str, Any], Tensor]


def search_scale(
    weights: Sequence[Tensor],
    schemes: Sequence[Scheme],
    stats: Stats,
    scale_dtype: torch.dtype,
    options: Options,
    source: Source | None = None,
    *,
    exact: bool = False,
) -> tuple[Tensor, dict[str, Any]]:
    """The scale by source row (float32) under which `weights` (float32 [out, in]) lose least, and how it was found.

    Never worse than not scaling. `exact` tries powers of two only. Raises InputError without second moments.
    """
    if stats.second_moment is None:
        raise InputError("--method awq", "needs calibration statistics", "give a --dataset")
    hessian = stats.second_moment / max(stats.tokens, 1)
    pairs = list(zip(weights, schemes, strict=True))
    trials = list(_candidates(pairs, hessian.diagonal(), options["grid"], source))
    if exact:
        trials = [(record, folding.power_of_two(scale)) for record, scale in trials]
    judge = left_over(hessian, options["damp"]) if options["compensated"] else hessian

    def loss(some: Weighted, scale: Tensor) -> Tensor:
        columns = folding.spread(scale, source)
        return torch.stack(
            [rounding_loss(weight, scheme, columns, scale_dtype, judge) for weight, scheme in some]
        ).sum()

    scales = [scale for _, scale in trials]
    best, before, after = best_scale(pairs, scales, loss, options["rows"], options["finalists"])
    return scales[best], {**trials[best][0], "error_before": before, "error_after": after}


def _candidates(pairs: Weighted, energy: Tensor, grid: int, source: Source | None) -> Iterator[Candidate]:
    """No scale, then the plain form x^α and the duo form x^α / w^(1-α), for α in [0, 1).

    x is the root mean square input of a channel, w the mean share that its weights have of their group's largest.
    """
    x = floored(folding.gathered(energy, source).sqrt())
    w = floored(folding.gathered(_share(pairs), source))
    yield {"form": "none", "alpha": 0.0}, torch.ones_like(x)
    for step in range(grid):
        alpha = step / grid
        if step:
            yield {"form": "plain", "alpha": alpha}, _normalised(x**alpha)
        yield {"form": "duo", "alpha": alpha}, _normalised(x**alpha / w ** (1 - alpha))


def _share(pairs: Weighted) -> Tensor:
    total = torch.zeros(pairs[0][0].shape[1], device=pairs[0][0].device)
    for weight, scheme in pairs:
        size = weight.abs().view(weight.shape[0], scheme.groups(weight.shape[1]), -1)
        total += (size / size.amax(-1, keepdim=True).clamp_(min=1e-12)).view(weight.shape).sum(0)
    return total / sum(weight.shape[0] for weight, _ in pairs)


def _normalised(scale: Tensor) -> Tensor:
    return scale / (scale.amax() * scale.amin()).sqrt()


def awq(feed: LiveFeed, scale_dtype: torch.dtype, options: Options) -> dict[str, Any]:
    """Search the scale of one feed and fold it. A feed without a source, or without quantised readers, is left alone.

    Readers that stay unquantised are rescaled too, by powers of two, which cost them nothing.

    Options: `grid`, exponents a form; `rows` and `finalists`, see `best_scale`; `compensated`, whether GPTQ rounds
    afterwards, so that only what it cannot make up for counts, under its `damp`.
    """
    quantised = [(target.weight.float(), target.scheme) for target in feed.targets if target.scheme is not None]
    if feed.source is None or not quantised:
        return {"source": None, "form": "none", "alpha": 0.0}
    weights, schemes = zip(*quantised, strict=True)
    kept = len(quantised) < len(feed.targets)
    scale, record = search_scale(weights, schemes, feed.stats, scale_dtype, options, feed.source, exact=kept)
    if record["form"] != "none":
        folding.apply(feed, scale, scale_dtype)
    return {"source": feed.source.name, **record}


AWQ = Transformation(
    "awq",
    awq,
    needs=frozenset({"second_moment"}),
    options={"grid": 20, "rows": 64, "finalists": 4, "compensated": False, "damp": 0.3},
    rounding_options={"scale_rule": "local-hessian"},
)
