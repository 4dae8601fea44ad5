"""How a group of weights gets its scale and zero point: the table of scale rules that every rounding draws on.

`minmax` covers the whole range. `mse` also tries to clip it and keeps what loses least of the weight, errors counted
with a power above two (`ERROR_POWER`), as the observers of other tools do; `local-hessian` keeps what loses least of
the output, weighing the error by the second moment of the group's inputs (which is AWQ's clip search, Lin et al. 2023,
arXiv 2306.00978, section 4, without a pass over the data). Scales are rounded to the dtype they are stored in before
anything is computed from them, so that what is searched is what will be served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..formats.errors import InputError, nearest
from ..formats.rounded import QParams, decode, encode
from ..formats.scheme import Scheme

Cost = Callable[[Tensor], Tensor]  # error [rows, groups, span] -> cost [rows, groups]
RULES = ("minmax", "mse", "local-hessian")
ERROR_POWER = 3
"""Plain squares clip the large weights of long groups, which matter most to the model: one scale a row, W4A16, KL on
development text: SmolLM2 .87 without clipping, 1.22 with squares, .72 with cubes; bookllama-22m .087, .087, .072. Short
groups hardly tell the powers apart."""
SHRINKS = (1.0, 1.04, *(1.0 - 0.04 * step for step in range(1, 13)))
_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 24}


def check_rule(rule: str) -> str:
    """`rule` if the table has it. Raises InputError with the nearest name."""
    if rule not in RULES:
        raise InputError(f"--scale-rule {rule}", "no scale rule has this name", nearest(rule, RULES))
    return rule


def choose(
    weight: Tensor, scheme: Scheme, rule: str, scale_dtype: torch.dtype, second_moment: Tensor | None = None
) -> QParams:
    """Scales and zero points of `weight` (float32 [out, in]) by `rule`.

    Scales come in `scale_dtype`, positive, finite and small enough that no code decodes to infinity; zeros are codes
    (int8), or real numbers in `scale_dtype` where the scheme stores them so. A range always contains 0. `second_moment`
    [in, in] is what `local-hessian` needs. Raises InputError for an unknown rule, or one whose statistics are missing.
    """
    check_rule(rule)
    if rule == "local-hessian" and second_moment is None:
        raise InputError("--scale-rule local-hessian", "needs calibration statistics", "give a --dataset or use mse")
    grouped = weight.reshape(weight.shape[0], scheme.groups(weight.shape[1]), -1)
    cost = _powers if rule == "mse" or second_moment is None else _weighted(second_moment, grouped.shape[1])
    parts: list[QParams] = []
    for rows in row_chunks(grouped):
        if rule == "minmax":
            parts.append(fit_range(*value_range(rows), scheme, scale_dtype))
        else:
            parts.append(search(rows, scheme, scale_dtype, cost))
    zeros = [part.zero for part in parts if part.zero is not None]
    return QParams(torch.cat([part.scale for part in parts]), torch.cat(zeros) if zeros else None)


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


def search(rows: Tensor, scheme: Scheme, scale_dtype: torch.dtype, cost: Cost) -> QParams:
    """For each group of `rows` [rows, groups, span] the shrunk range with the least cost; the whole range is first."""
    low, high = value_range(rows)
    best = fit_range(low, high, scheme, scale_dtype)
    least = cost(_error(rows, scheme, best))
    for shrink in SHRINKS[1:]:
        trial = fit_range(low * shrink, high * shrink, scheme, scale_dtype)
        spent = cost(_error(rows, scheme, trial))
        better = spent < least
        least = torch.where(better, spent, least)
        best = pick(better, trial, best)
    return best


def pick(mask: Tensor, this: QParams, other: QParams) -> QParams:
    """`this` where `mask` [rows, groups] holds, `other` elsewhere."""
    zero = None if this.zero is None or other.zero is None else torch.where(mask, this.zero, other.zero)
    return QParams(torch.where(mask, this.scale, other.scale), zero)


def _error(rows: Tensor, scheme: Scheme, params: QParams) -> Tensor:
    scale = params.scale.float().unsqueeze(-1)
    zero = None if params.zero is None else params.zero.float().unsqueeze(-1)
    return decode(encode(rows, scheme, scale, zero), scheme, scale, zero).sub_(rows)


def value_range(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest weight of each group, 0 always between them: two tensors [rows, groups]."""
    low, high = torch.aminmax(rows, dim=-1)
    return low.clamp_(max=0), high.clamp_(min=0)


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


def row_chunks(grouped: Tensor) -> Iterator[Tensor]:
    """Slices of rows small enough for the caches of a CPU, or for a few launches on a GPU."""
    step = max(1, _CHUNK.get(grouped.device.type, 1 << 20) // grouped[0].numel())
    return iter(grouped.split(step))
