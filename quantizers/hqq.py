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

from dataclasses import replace

import torch
from torch import Tensor

from ..calibration.statistics import Stats
from ..formats.rounded import QParams, Rounded, encode, round_to_grid
from ..formats.scheme import Scheme
from .method import Options, Rounding
from .scales import DEFAULT, Scales, choose, joined, peak_of, pick, resolve, row_chunks, storage


def shares_scales(scheme: Scheme) -> str | None:
    """Why the scales of a scheme cannot be refined by this method, or None."""
    return None if scheme.sharing_rows(2) == 1 else "several rows share a scale"


def round_hqq(
    weight: Tensor,
    scheme: Scheme,
    stats: Stats | None,
    scale_dtype: torch.dtype,
    options: Options,
    peak: Tensor | None = None,
) -> Rounded:
    """Codes nearest to `weight` (float32 [out, in]) under refined parameters; `stats` are not looked at.

    Options: `scale_rule` to start from; `norm`, the p of ℓp; `beta`, how firmly what is set aside is held to the error,
    in units of a step; `iterations`.
    """
    del stats
    rule = resolve(options["scale_rule"], scheme)
    start = choose(weight, scheme, rule, scale_dtype, peak=peak)
    if scheme.zero_dtype == "float" and start.zero is not None:
        start = replace(start, zero=start.zero.round())  # the published start; it ends .02 lower in KL than a real one
    grouped = weight.reshape(weight.shape[0], start.groups, -1)
    scales = storage(scheme, rule, scale_dtype, peak_of(weight, peak))
    done: list[QParams] = []
    row = 0
    for rows in row_chunks(grouped):
        done.append(refine(rows, scheme, start.rows(row, row + rows.shape[0]), scales, options))
        row += rows.shape[0]
    return round_to_grid(weight, scheme, joined(done))


def refine(rows: Tensor, scheme: Scheme, start: QParams, scales: Scales, options: Options) -> QParams:
    """The best parameters met on the way from `start` for the groups of `rows` (float32 [rows, groups, span])."""
    norm, beta = options["norm"], options["beta"]
    best = current = start
    least = torch.full_like(start.step, torch.inf)
    for step in range(options["iterations"] + 1):
        scale, zero = current.step, None if current.zero is None else current.zero.float()
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
        goal = units - kept
        current = _stretched(goal, values, current, scales) if stretch else _moved(goal, values, scheme, current)
    return best


def lp_cost(rows: Tensor, scheme: Scheme, params: QParams, norm: float) -> Tensor:
    """Σ |error|^p of each group [rows, groups]: what `refine` lessens."""
    scale, zero = params.step, None if params.zero is None else params.zero.float()
    units, values = _in_steps(rows, scheme, scale, zero)
    return ((units - values).abs() ** norm).sum(-1) * scale**norm


def _in_steps(rows: Tensor, scheme: Scheme, scale: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights, and the values of their nearest codes, both in units of the scale."""
    wide_scale, wide_zero = scale.unsqueeze(-1), None if zero is None else zero.unsqueeze(-1)
    values = scheme.grid.decode(encode(rows, scheme, wide_scale, wide_zero))
    return rows / wide_scale, values if wide_zero is None else values.sub_(wide_zero)


def _stretched(goal: Tensor, values: Tensor, params: QParams, scales: Scales) -> QParams:
    """The scales by which `values` fit `goal` best in least squares; both are in steps."""
    energy = values.square().sum(-1)
    factor = torch.where(energy > 0, (goal * values).sum(-1) / energy, torch.ones_like(energy))
    return scales.refit(params.step * factor.clamp(0.5, 2.0), params)


def _moved(goal: Tensor, values: Tensor, scheme: Scheme, params: QParams) -> QParams:
    """The zero points by which `values` fit `goal` best in least squares; both are in steps."""
    if params.zero is None:
        return params
    zero = params.zero.float() + (values - goal).mean(-1)
    if scheme.zero_dtype == "float":
        return replace(params, zero=zero.to(params.scale.dtype))
    return replace(params, zero=zero.round_().clamp_(scheme.grid.lowest, scheme.grid.highest).to(torch.int8))


HQQ = Rounding(
    "hqq",
    round_hqq,
    misfit=shares_scales,
    options={"scale_rule": DEFAULT, "norm": 2.0, "beta": 1.0, "iterations": 20},
)
