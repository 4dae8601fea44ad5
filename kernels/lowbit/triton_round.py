"""Triton kernel that rounds activations to codes and back, for products that take them as 16-bit numbers.

One program a token, in one pass where PyTorch would make a dozen. The arithmetic is that of
`activations.quantize_activation`, bit for bit: scales of tokens or of groups, as numbers, powers of two (MX) or E4M3
under a calibrated global scale (NVFP4). Where a rule tries several scales of a group, sums of errors may be rounded
otherwise, so that of two that are as good the other one can be taken.
"""

# What Triton compiles means other things than it says as Python.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from math import floor, log2

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...formats.float_grids import E2M1, E4M3
from ...formats.grids import INT4, INT8
from ..activations import TRIALS
from .triton_quantize import largest, on_grid, rounded

GRIDS = {grid.name: grid for grid in (INT4, INT8, E2M1, E4M3)}
MANTISSAS = {"e2m1": (1, 0), "e4m3": (3, -6)}
"""By grid: bits of the mantissa, and the exponent below which steps stay the same. Others are integers."""


@triton.jit
def _codes(x, scale, lowest, highest, MANTISSA: tl.constexpr, LEAST: tl.constexpr, HALF: tl.constexpr,
           BRAIN: tl.constexpr):  # fmt: skip
    """x [groups, SPAN] over `scale` [groups] on the grid; quotients are of the dtype that HALF and BRAIN name."""
    q = rounded(tl.div_rn(x, scale[:, None] + tl.zeros_like(x)), HALF, BRAIN)
    q = tl.minimum(tl.maximum(q, lowest), highest)
    if MANTISSA == 0:
        return (q + 12582912.0) - 12582912.0  # halves to even
    return on_grid(q, MANTISSA, LEAST)


@triton.jit
def _code(scale):
    """The nearest E4M3 numbers."""
    return on_grid(tl.minimum(scale, 448.0), 3, -6)


@triton.jit
def _unit(code, given):
    """What E4M3 scales `code` are worth under the global one."""
    return tl.div_rn(tl.where(code == 0, 0.125, code), given + tl.zeros_like(code))


@triton.jit
def _round(
    x_ptr, given_ptr, y_ptr, K, lowest, highest, reach, reach_power, tiny,
    SPAN: tl.constexpr, WIDTH: tl.constexpr, SCALES: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr,
    HALF: tl.constexpr, BRAIN: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, FOUR: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, WIDTH)
    place = tl.program_id(0).to(tl.int64) * K + k
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.reshape(tl.load(x_ptr + place, mask=k < K, other=0).to(tl.float32), (WIDTH // SPAN, SPAN))
    amax = largest(x, 1)
    if SCALES == 1:  # the power of two below, or the next one from 1.75 times it on
        below = (amax.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(amax >= 1.75 * below, 2.0 * below, below) * reach_power
        scale = tl.maximum(scale, tiny)
    elif SCALES == 2:
        given = tl.load(given_ptr)
        code = _code(rounded(tl.div_rn(amax, reach + tl.zeros_like(amax)), HALF, BRAIN) * given)
        scale = _unit(code, given)
    else:
        scale = rounded(tl.div_rn(amax, reach + tl.zeros_like(amax)), HALF, BRAIN)
        scale = tl.where(scale == 0, tiny, scale)
    q = _codes(x, scale, lowest, highest, MANTISSA, LEAST, HALF and SCALES == 0, BRAIN and SCALES == 0)
    if LOW < HIGH:  # codes of scales around the first one, or one other
        off = q * scale[:, None] - x
        least = tl.sum(off * off, 1)
        for step in tl.static_range(LOW, HIGH + 1):
            if step != 0:
                if FOUR:
                    trial = _unit(_code(rounded(amax * 0.25, HALF, BRAIN) * given), given)
                else:
                    bits = tl.maximum(code.to(tl.int32, bitcast=True) + step * 1048576, 0)
                    trial = _unit(_code(bits.to(tl.float32, bitcast=True)), given)
                other = _codes(x, trial, lowest, highest, MANTISSA, LEAST, False, False)
                off = other * trial[:, None] - x
                lost = tl.sum(off * off, 1)
                better = lost < least
                q = tl.where(better[:, None], other, q)
                scale = tl.where(better, trial, scale)
                least = tl.where(better, lost, least)
    y = rounded(q * scale[:, None], HALF, BRAIN)
    y = tl.where((amax == amax)[:, None], y, amax[:, None])  # a minimum or a maximum would have lost NaN
    y = tl.reshape(y, (WIDTH,))
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=k < K)


def quantize(
    x: Tensor,
    grid: str,
    group: int,
    coded: bool,
    given: Tensor | None = None,
    scale_rule: str = "max",
    pdl: bool = False,
) -> Tensor:
    """x [M, in] rounded to the `grid` of that name with a scale for `group` inputs, 0 for a token.

    `coded` scales are powers of two, or E4M3 numbers where `given`, their calibrated global scale float32 [1], is
    there; `scale_rule` is as in `activations.py`. Rows of `x` are contiguous, groups divide them. `pdl` starts the
    kernel before its predecessor has finished.
    """
    features, to = x.shape[1], GRIDS[grid]
    width = triton.next_power_of_2(features)
    y, scales = torch.empty_like(x), 0 if not coded else 1 if given is None else 2
    mantissa, least = MANTISSAS.get(grid, (0, 0))
    tiny = 2.0**-127 if scales == 1 else torch.finfo(x.dtype).eps
    trials = {"max": (0,), "four-over-six": (0, 1), "mse": TRIALS}[scale_rule] if scales == 2 else (0,)
    options = {"launch_pdl": True} if pdl else {}
    _round[(x.shape[0],)](
        x, y if given is None else given, y, features, to.lowest, to.highest, to.highest if coded else to.reach,
        2.0 ** -floor(log2(to.highest)), tiny, SPAN=group or width, WIDTH=width, SCALES=scales, MANTISSA=mantissa,
        LEAST=least, HALF=x.dtype == torch.float16, BRAIN=x.dtype == torch.bfloat16, LOW=min(trials),
        HIGH=max(trials), FOUR=scale_rule == "four-over-six", PDL=pdl,
        num_warps=min(16, max(1, width // 512)), **options,
    )  # fmt: skip
    return y
