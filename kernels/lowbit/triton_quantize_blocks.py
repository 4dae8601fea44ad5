"""Triton kernel that turns activations into 8-bit codes with a scale for every group of inputs, or a scale a token and
the order of inputs that 4-bit weights are unpacked in.

One program a token. The arithmetic is that of `activations.activation_codes`, in the dtype of the activations, so that
codes and scales agree with it bit for bit.
"""

# What Triton compiles means other things than it says as Python.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .narrow import pitch
from .triton_quantize import largest, on_grid, rounded


@triton.jit
def _quantize(
    x_ptr, codes_ptr, scale_ptr, K, row, reach, tiny,
    SPAN: tl.constexpr, WIDTH: tl.constexpr, SHUFFLE: tl.constexpr, PDL: tl.constexpr, HALF: tl.constexpr,
    BRAIN: tl.constexpr, FLOATING: tl.constexpr, TWIN: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, WIDTH)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.reshape(tl.load(x_ptr + token * K + k, mask=k < K, other=0).to(tl.float32), (WIDTH // SPAN, SPAN))
    peak = largest(x, 1)
    scale = rounded(tl.div_rn(peak, reach + tl.zeros_like(peak)), HALF, BRAIN)
    scale = tl.where(scale == 0, tiny, scale)
    scale = tl.where(peak == peak, scale, peak)
    if BRAIN:  # as in triton_quantize: no quotient lies near enough to a change of rounding
        q = x * tl.div_rn(1.0 + tl.zeros_like(scale), scale)[:, None]
    else:
        q = tl.div_rn(x, scale[:, None] + tl.zeros_like(x))
    q = rounded(q, HALF, BRAIN)
    if FLOATING:
        q = tl.minimum(tl.maximum(q, -448.0), 448.0)
        if TWIN:
            q = on_grid(q, 3, -6)
        codes = tl.reshape(q.to(tl.float8e4nv), (WIDTH,))
    else:
        q = tl.minimum(tl.maximum(q, -128.0), 127.0)
        q = (q + 12582912.0) - 12582912.0  # halves to even
        codes = tl.reshape(q.to(tl.int8), (WIDTH,))
    if SHUFFLE:  # narrow.shuffled
        digits = tl.reshape(codes, (WIDTH // 128, 2, 2, 2, 2, 4, 2))
        codes = tl.reshape(tl.permute(digits, (0, 1, 4, 3, 5, 6, 2)), (WIDTH,))
    tl.store(codes_ptr + token * K + k, codes, mask=k < K)
    group = tl.arange(0, WIDTH // SPAN)
    tl.store(scale_ptr + group.to(tl.int64) * row + token, scale, mask=group * SPAN < K)


def quantize(x: Tensor, group: int, floating: bool, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """Codes [M, in] of `x` [M, in], int8 or float8_e4m3fn where `floating`, and their scales in float32.

    Scales of `group` inputs, a power of two, are [in / group, `narrow.pitch(M)`], of which the last few are undefined;
    `group` 0 is one scale a token, [M], and codes shuffled (`narrow.shuffled`). Rows of `x` are contiguous and whole
    groups, or 128 inputs. `pdl` starts the kernel before its predecessor in the stream has finished (Hopper on).
    """
    tokens, features = x.shape
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn if floating else torch.int8)
    sizes = (features // group, pitch(tokens)) if group else (tokens,)
    scale = torch.empty(sizes, dtype=torch.float32, device=x.device)
    width = max(128, triton.next_power_of_2(features))
    options = {"launch_pdl": True} if pdl else {}
    _quantize[(tokens,)](
        x, codes, scale, features, sizes[-1], 448.0 if floating else 127.5, torch.finfo(x.dtype).eps,
        SPAN=group or width, WIDTH=width, SHUFFLE=group == 0, PDL=pdl, HALF=x.dtype == torch.float16,
        BRAIN=x.dtype == torch.bfloat16, FLOATING=floating, TWIN=not x.is_cuda,
        num_warps=min(16, max(1, width // 512)), **options,
    )  # fmt: skip
    return codes, scale
