"""How a group of weights gets its scale and zero point: the table of scale rules that every rounding draws on.

`minmax` covers the whole range. `mse` also tries other scales and keeps what loses least of the weight;
`local-hessian` keeps what loses least of the output, weighing the error by the second moment of the group's inputs
(which is AWQ's clip search, Lin et al. 2023, arXiv 2306.00978, section 4, without a pass over the data). Scales that
are codes have rules of their own on top (`coded_scales.py`). A scheme has a rule that is used where none is asked for.

Scales are rounded to what is stored before anything is computed from them, so that what is searched is what will be
served. Rows that share a scale are judged together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..formats.errors import InputError, nearest
from ..formats.float_grids import E8M0, FloatGrid
from ..formats.rounded import QParams
from ..formats.rounded import nearest as rounded_to
from ..formats.scheme import Scheme
from .coded_scales import EXPONENT_RULES, FOUR_OVER_SIX, GlobalScales, PowerScales, own_rules

Cost = Callable[[Tensor], Tensor]  # error [rows, groups, span] -> cost [rows, groups]
DEFAULT = "default"
SEARCHES = ("mse", "local-hessian", FOUR_OVER_SIX)
RULES = (DEFAULT, "minmax", "max", "mse", "local-hessian", *EXPONENT_RULES, FOUR_OVER_SIX)
ERROR_POWER = 3
"""Plain squares clip the large weights of long groups, which matter most to the model: one scale a row, W4A16, KL on
development text: SmolLM2 .87 without clipping, 1.22 with squares, .72 with cubes; bookllama-22m .087, .087, .072. Short
groups hardly tell the powers apart, and the blocks of formats with coded scales use squares, as their authors do."""
SHRINKS = (1.0, 1.04, *(1.0 - 0.04 * step for step in range(1, 13)))
_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 24}


class Scales(Protocol):
    """How scales of one kind are fitted and stored."""

    def first(self, low: Tensor, high: Tensor) -> QParams:
        """Scales whose grid just covers [low, high] (float32 [rows, groups], low ≤ 0 ≤ high)."""
        ...

    def trials(self, low: Tensor, high: Tensor) -> Iterator[QParams]:
        """Others that may lose less."""
        ...

    def refit(self, step: Tensor, like: QParams) -> QParams:
        """Scales nearest to `step` (float32 [rows, groups]), with the zero points of `like`."""
        ...


def check_rule(rule: str) -> str:
    """`rule` if the table has it. Raises InputError with the nearest name."""
    if rule not in RULES:
        raise InputError(f"--scale-rule {rule}", "no scale rule has this name", nearest(rule, RULES))
    return rule


def resolve(rule: str, scheme: Scheme) -> str:
    """The rule that `rule` stands for with `scheme`. Raises InputError where its scales have no such rule.

    A scale that spans a tensor is that of other weights too, and so is not searched for in one of them.
    """
    name = {DEFAULT: scheme.scale_rule, "max": "minmax"}.get(check_rule(rule), rule)
    own = own_rules(scheme.scale_grid)
    if name in (*EXPONENT_RULES, FOUR_OVER_SIX) and name not in own:
        allowed = ", ".join(("minmax", "mse", "local-hessian", *own))
        raise InputError(f"--scale-rule {rule}", f"is not for the scales of {scheme.name}", f"use one of {allowed}")
    return "minmax" if scheme.strategy == "tensor" else name


def choose(
    weight: Tensor,
    scheme: Scheme,
    rule: str,
    scale_dtype: torch.dtype,
    second_moment: Tensor | None = None,
    peak: Tensor | None = None,
) -> QParams:
    """Scales and zero points of `weight` (float32 [out, in]) by `rule`.

    Scales come in `scale_dtype` or as codes, positive, finite and small enough that no code decodes to infinity; zeros
    are codes (int8), or real numbers in `scale_dtype` where the scheme stores them so. A range always contains 0.
    `second_moment` [in, in] is what `local-hessian` needs; `peak` (one number) the largest magnitude of all weights
    that must agree on what spans a tensor, this weight's own if None. Raises InputError for an unknown rule, one that
    the scheme does not have, or one whose statistics are missing.
    """
    rule = resolve(rule, scheme)
    if rule == "local-hessian" and second_moment is None:
        raise InputError("--scale-rule local-hessian", "needs calibration statistics", "give a --dataset or use mse")
    grouped = weight.reshape(weight.shape[0], scheme.groups(weight.shape[1]), -1)
    cost = _squares if scheme.scale_grid else _powers
    if rule == "local-hessian" and second_moment is not None:
        cost = _weighted(second_moment, grouped.shape[1])
    whole = peak_of(weight, peak)
    scales = storage(scheme, rule, scale_dtype, whole)
    count = scheme.sharing_rows(weight.shape[0])
    parts: list[QParams] = []
    for rows in row_chunks(grouped, count):
        low, high = value_range(rows)
        if scheme.strategy == "tensor":
            low, high = -whole.expand_as(low), whole.expand_as(high)
        low, high = shared(low, count, torch.amin), shared(high, count, torch.amax)
        if rule in SEARCHES:
            parts.append(search(rows, scheme, scales, low, high, lambda error: shared(cost(error), count, torch.sum)))
        else:
            parts.append(scales.first(low, high))
    return joined(parts)


def peak_of(weight: Tensor, peak: Tensor | None) -> Tensor:
    """`peak`, or the largest magnitude of `weight` where it is None: float32, one number on its device."""
    return (torch.stack(torch.aminmax(weight)).abs().amax() if peak is None else peak.to(weight.device)).float()


def storage(scheme: Scheme, rule: str, scale_dtype: torch.dtype, peak: Tensor) -> Scales:
    """How scales of `scheme` are fitted and stored under `rule` (a resolved one); `peak` as `peak_of` has it."""
    if scheme.scale_grid == E8M0:
        return PowerScales.of(scheme, rule, scale_dtype)
    if isinstance(scheme.scale_grid, FloatGrid):
        return GlobalScales.of(scheme, rule, scale_dtype, peak)
    return PlainScales(scheme, scale_dtype)


def joined(parts: list[QParams]) -> QParams:
    """Parameters of some rows each as those of all of them."""
    zeros = [part.zero for part in parts if part.zero is not None]
    scale = torch.cat([part.scale for part in parts])
    return replace(parts[0], scale=scale, zero=torch.cat(zeros) if zeros else None)


def shared(values: Tensor, count: int, reduce: Callable[..., Tensor]) -> Tensor:
    """`values` [rows, groups], each replaced by the reduction over the `count` rows that share a scale with it.

    Blocks of rows start at the first; the last may be shorter.
    """
    if count <= 1:
        return values
    parts = [reduce(part, 0, True).expand_as(part) for part in values.split(count)]
    return torch.cat(parts)


@dataclass(frozen=True)
class PlainScales:
    """Scales that are numbers in `dtype`, with zero points where the scheme has them."""

    scheme: Scheme
    dtype: torch.dtype

    def first(self, low: Tensor, high: Tensor) -> QParams:
        """See `fit_range`."""
        return fit_range(low, high, self.scheme, self.dtype)

    def trials(self, low: Tensor, high: Tensor) -> Iterator[QParams]:
        """Shrunk ranges, and one that is a little wider."""
        for shrink in SHRINKS[1:]:
            yield self.first(low * shrink, high * shrink)

    def refit(self, step: Tensor, like: QParams) -> QParams:
        """`step` as stored."""
        span = self.scheme.grid.highest - self.scheme.grid.lowest
        return QParams(bounded(step, span, self.dtype), like.zero)


def fit_range(low: Tensor, high: Tensor, scheme: Scheme, scale_dtype: torch.dtype) -> QParams:
    """The parameters whose grid just covers [low, high] (float32 [rows, groups], low ≤ 0 ≤ high)."""
    grid = scheme.grid
    span = grid.highest - grid.lowest
    if scheme.symmetric:
        scale = torch.maximum(high, -low).double() / grid.reach
    else:
        scale = (high.double() - low.double()) / span
    stored = bounded(scale, span, scale_dtype)
    if scheme.symmetric:
        return QParams(stored)
    zero = grid.lowest - low / stored.float()
    if scheme.zero_dtype == "float":
        return QParams(stored, zero.to(scale_dtype))
    return QParams(stored, zero.round_().clamp_(grid.lowest, grid.highest).to(torch.int8))


def bounded(scale: Tensor, span: float, scale_dtype: torch.dtype) -> Tensor:
    """`scale` (any float dtype) in `scale_dtype`: neither so small that it vanishes nor so large that codes overflow.

    A group without a range (all zero) gets the least scale there is, under which every code is 0.
    """
    info = torch.finfo(scale_dtype)
    least = max(info.smallest_normal * info.eps, torch.finfo(torch.float32).tiny)
    return scale.clamp(least, info.max / (span + 1)).to(scale_dtype)


def search(rows: Tensor, scheme: Scheme, scales: Scales, low: Tensor, high: Tensor, cost: Cost) -> QParams:
    """For each group of `rows` [rows, groups, span], of range [low, high], the scale with the least cost."""
    best = scales.first(low, high)
    least = cost(_error(rows, scheme, best))
    for trial in scales.trials(low, high):
        spent = cost(_error(rows, scheme, trial))
        better = spent < least
        least = torch.where(better, spent, least)
        best = pick(better, trial, best)
    return best


def pick(mask: Tensor, this: QParams, other: QParams) -> QParams:
    """`this` where `mask` [rows, groups] holds, `other` elsewhere."""
    zero = None if this.zero is None or other.zero is None else torch.where(mask, this.zero, other.zero)
    return replace(this, scale=torch.where(mask, this.scale, other.scale), zero=zero)


def _error(rows: Tensor, scheme: Scheme, params: QParams) -> Tensor:
    return rounded_to(rows, scheme, params).sub_(rows)


def value_range(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest weight of each group, 0 always between them: two tensors [rows, groups]."""
    low, high = torch.aminmax(rows, dim=-1)
    return low.clamp_(max=0), high.clamp_(min=0)


def _squares(error: Tensor) -> Tensor:
    """Σ error² of each group."""
    return error.square_().sum(-1)


def _powers(error: Tensor) -> Tensor:
    """Σ |error|³ of each group: `ERROR_POWER` without a call of pow."""
    size = error.abs_()
    return (size * size).mul_(size).sum(-1)


def _weighted(second_moment: Tensor, groups: int) -> Cost:
    """Output error by each group alone, err H_gg errᵀ; of a single group (a whole row) only the diagonal is used."""
    span = second_moment.shape[0] // groups
    if groups == 1:
        diagonal = second_moment.diagonal().contiguous()
        return lambda error: error.square_() @ diagonal
    blocks = second_moment.view(groups, span, groups, span).diagonal(dim1=0, dim2=2).permute(2, 0, 1)

    def cost(error: Tensor) -> Tensor:
        by_group = error.transpose(0, 1)
        return (torch.bmm(by_group, blocks) * by_group).sum(-1).T

    return cost


def row_chunks(grouped: Tensor, together: int = 1) -> Iterator[Tensor]:
    """Slices of rows small enough for the caches of a CPU, or for a few launches on a GPU; `together` rows stay so."""
    step = max(1, _CHUNK.get(grouped.device.type, 1 << 20) // grouped[0].numel())
    return iter(grouped.split(-(-step // together) * together))
