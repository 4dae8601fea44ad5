"""HQQ: scales and zero points refined by half-quadratic splitting, from the weights alone.

Badri & Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning Models". The rounding error is measured in an
ℓp norm, which with p < 1 forgives a few large errors. Each step sets aside the part of the error that such a norm
forgives (a shrinkage) and fits the zero point to what remains by least squares. Where there is none, the scale is
fitted; where it is an integer, which hardly ever moves by itself, the two take turns. The defaults set nothing aside
and judge by squares: the published settings set nothing aside either on weights of usual size, and judging by p = 0.7
does worse in KL.

Zero points that are stored as integers stay integers while they are fitted, and every group keeps the best parameters
it has seen, so the result is never worse than the rule it started from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..calibration.statistics import Stats
from ..formats.rounded import QParams, Rounded, encode, round_to_grid
from ..formats.scheme import Scheme
from .method import Options, Rounding
from .scales import bounded, choose, pick, row_chunks


def round_hqq(
    weight: Tensor, scheme: Scheme, stats: Stats | None, scale_dtype: torch.dtype, options: Options
) -> Rounded:
    """Codes nearest to `weight` (float32 [out, in]) under refined parameters; `stats` are not looked at.

    Options: `scale_rule` to start from; `norm`, the p of ℓp; `beta`, how firmly what is set aside is held to the error,
    in units of a step; `iterations`.
    """
    del stats
    start = choose(weight, scheme, options["scale_rule"], scale_dtype)
    if scheme.zero_dtype == "float" and start.zero is not None:
        start = QParams(start.scale, start.zero.round())  # the published start; it ends .02 lower in KL than a real one
    grouped = weight.reshape(weight.shape[0], start.scale.shape[1], -1)
    done: list[QParams] = []
    row = 0
    for rows in row_chunks(grouped):
        here = slice(row, row + rows.shape[0])
        row += rows.shape[0]
        first = QParams(start.scale[here], None if start.zero is None else start.zero[here])
        done.append(refine(rows, scheme, first, options))
    zeros = [part.zero for part in done if part.zero is not None]
    params = QParams(torch.cat([part.scale for part in done]), torch.cat(zeros) if zeros else None)
    return round_to_grid(weight, scheme, params)


def refine(rows: Tensor, scheme: Scheme, start: QParams, options: Options) -> QParams:
    """The best parameters met on the way from `start` for the groups of `rows` (float32 [rows, groups, span])."""
    norm, beta = options["norm"], options["beta"]
    best = current = start
    least = torch.full_like(start.scale, torch.inf, dtype=torch.float32)
    for step in range(options["iterations"] + 1):
        scale, zero = current.scale.float(), None if current.zero is None else current.zero.float()
        units, values = _in_steps(rows, scheme, scale, zero)
        error = units - values
        size = error.abs().clamp_(min=1e-12)
        steep = size ** (norm - 1)
        cost = (size * steep).sum(-1) * scale**norm
        better = cost < least
        least = torch.where(better, cost, least)
        best = pick(better, current, best)
        kept = error.sign() * (size - steep / beta).clamp_(min=0)
        stretch = zero is None or (scheme.zero_dtype == "int" and step % 2 == 1)
        current = _fit(units - kept, values, scheme, current, stretch=stretch)
    return best


def lp_cost(rows: Tensor, scheme: Scheme, params: QParams, norm: float) -> Tensor:
    """Σ |error|^p of each group [rows, groups]: what `refine` lessens."""
    scale, zero = params.scale.float(), None if params.zero is None else params.zero.float()
    units, values = _in_steps(rows, scheme, scale, zero)
    return ((units - values).abs() ** norm).sum(-1) * scale**norm


def _in_steps(rows: Tensor, scheme: Scheme, scale: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights, and the values of their nearest codes, both in units of the scale."""
    wide_scale, wide_zero = scale.unsqueeze(-1), None if zero is None else zero.unsqueeze(-1)
    values = scheme.grid.decode(encode(rows, scheme, wide_scale, wide_zero))
    return rows / wide_scale, values if wide_zero is None else values.sub_(wide_zero)


def _fit(goal: Tensor, values: Tensor, scheme: Scheme, params: QParams, *, stretch: bool) -> QParams:
    """Least squares of `goal` by `values`, both in steps: the zero point moves all values, the scale stretches them."""
    if params.zero is None or stretch:
        energy = values.square().sum(-1)
        factor = torch.where(energy > 0, (goal * values).sum(-1) / energy, torch.ones_like(energy))
        span = scheme.grid.highest - scheme.grid.lowest
        scale = bounded(params.scale.float() * factor.clamp(0.5, 2.0), span, params.scale.dtype)
        return QParams(scale, params.zero)
    zero = params.zero.float() + (values - goal).mean(-1)
    if scheme.zero_dtype == "float":
        return QParams(params.scale, zero.to(params.scale.dtype))
    return QParams(params.scale, zero.round_().clamp_(scheme.grid.lowest, scheme.grid.highest).to(torch.int8))


HQQ = Rounding(
    "hqq",
    round_hqq,
    options={"scale_rule": "minmax", "norm": 2.0, "beta": 1.0, "iterations": 20},
)
