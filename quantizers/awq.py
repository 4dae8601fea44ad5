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

from ..calibration.statistics import Stats
from ..formats.errors import InputError
from ..formats.rounded import fake_quantize
from ..formats.scheme import Scheme
from . import folding
from .gptq import factorize
from .method import LiveFeed, Options, Source, Transformation
from .scales import choose

Weighted = Sequence[tuple[Tensor, Scheme]]
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

    All candidates are judged on at most `rows` rows a weight, the `finalists` best and the scale of one on all rows, so
    the result is never worse than not scaling. `exact` tries powers of two only. Raises InputError without second
    moments.
    """
    if stats.second_moment is None:
        raise InputError("--method awq", "needs calibration statistics", "give a --dataset")
    hessian = stats.second_moment / max(stats.tokens, 1)
    pairs = list(zip(weights, schemes, strict=True))
    energy = hessian.diagonal()
    if options["compensated"]:
        hessian = _left_over(hessian, options["damp"])
    few = [(weight[:: -(-weight.shape[0] // options["rows"])], scheme) for weight, scheme in pairs]
    trials = list(_candidates(pairs, energy, options["grid"], source))
    if exact:
        trials = [(record, folding.power_of_two(scale)) for record, scale in trials]
    coarse = torch.stack([_loss(few, hessian, folding.spread(scale, source), scale_dtype) for _, scale in trials])
    finals = [trials[i] for i in coarse.topk(min(options["finalists"], len(trials)), largest=False).indices.tolist()]
    one = torch.ones_like(trials[0][1])
    finals.insert(0, ({"form": "none", "alpha": 0.0}, one))
    whole = torch.stack([_loss(pairs, hessian, folding.spread(scale, source), scale_dtype) for _, scale in finals])
    best = int(whole.nan_to_num(torch.inf).argmin())
    record = {**finals[best][0], "error_before": float(whole[0]), "error_after": float(whole[best])}
    return finals[best][1], record


def _candidates(pairs: Weighted, energy: Tensor, grid: int, source: Source | None) -> Iterator[Candidate]:
    """Plain form x^α and duo form x^α / w^(1-α), for α in [0, 1).

    x is the root mean square input of a channel, w the mean share that its weights have of their group's largest.
    """
    x = _floored(folding.gathered(energy, source).sqrt())
    w = _floored(folding.gathered(_share(pairs), source))
    for step in range(grid):
        alpha = step / grid
        if step:
            yield {"form": "plain", "alpha": alpha}, _normalised(x**alpha)
        yield {"form": "duo", "alpha": alpha}, _normalised(x**alpha / w ** (1 - alpha))


def _left_over(hessian: Tensor, damp: float) -> Tensor:
    """The part of each input's energy [in] that inputs rounded later cannot make up for: what its error costs GPTQ."""
    factor = factorize(hessian, damp, act_order=True)
    return factor.energy[factor.order.argsort()]


def _share(pairs: Weighted) -> Tensor:
    total = torch.zeros(pairs[0][0].shape[1], device=pairs[0][0].device)
    for weight, scheme in pairs:
        size = weight.abs().view(weight.shape[0], scheme.groups(weight.shape[1]), -1)
        total += (size / size.amax(-1, keepdim=True).clamp_(min=1e-12)).view(weight.shape).sum(0)
    return total / sum(weight.shape[0] for weight, _ in pairs)


def _floored(values: Tensor) -> Tensor:
    """Channels that are as good as silent must not drive the scale of the others to extremes."""
    return values.clamp(min=float(values.mean()) * 1e-3 + 1e-30)


def _normalised(scale: Tensor) -> Tensor:
    return scale / (scale.amax() * scale.amin()).sqrt()


def _loss(pairs: Weighted, hessian: Tensor, scale: Tensor, scale_dtype: torch.dtype) -> Tensor:
    """Mean squared output error, summed over outputs, of rounding `pairs` to nearest under `scale` [in].

    `hessian` is the second moment [in, in], or the energy of each input [in] where errors are taken as independent.
    """
    total = torch.zeros((), device=hessian.device)
    for weight, scheme in pairs:
        scaled = weight * scale
        error = fake_quantize(scaled, scheme, choose(scaled, scheme, "minmax", scale_dtype))
        error.div_(scale).sub_(weight)
        if hessian.dim() == 1:
            total += (error.square_().sum(0) * hessian).sum()
        else:
            total += (error @ hessian).mul_(error).sum()
    return total


def awq(feed: LiveFeed, scale_dtype: torch.dtype, options: Options) -> dict[str, Any]:
    """Search the scale of one feed and fold it. A feed without a source, or without quantised readers, is left alone.

    Readers that stay unquantised are rescaled too, by powers of two, which cost them nothing.

    Options: `grid`, exponents a form; `rows` and `finalists`, see `search_scale`; `compensated`, whether GPTQ rounds
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
    options={"grid": 20, "rows": 256, "finalists": 3, "compensated": False, "damp": 0.3},
    rounding_options={"scale_rule": "local-hessian"},
)
