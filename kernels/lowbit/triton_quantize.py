"""Triton kernel that turns activations into 8-bit codes and a scale a token, with the RMSNorm before it if asked.

One program a token: what is read once is normalised, measured and rounded in registers. The arithmetic is that of
`activations.quantize_activation`, in the dtype of the activations, so that codes agree with it bit for bit.
"""

# What Triton compiles means other things than it says as Python.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _quantize(
    x_ptr, weight_ptr, given_ptr, codes_ptr, scale_ptr, K, eps, tiny,
    NORM: tl.constexpr, GIVEN: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr, HALF: tl.constexpr,
    BRAIN: tl.constexpr, FLOATING: tl.constexpr, TWIN: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, WIDTH)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + token * K + k, mask=k < K, other=0).to(tl.float32)
    if NORM:
        x = rounded(x * tl.rsqrt(tl.sum(x * x, 0) / K + eps), HALF, BRAIN)
        x = rounded(x * tl.load(weight_ptr + k, mask=k < K, other=0).to(tl.float32), HALF, BRAIN)
    if GIVEN:
        scale = rounded(tl.load(given_ptr).to(tl.float32), HALF, BRAIN)
    else:
        peak = largest(x, 0)
        scale = rounded(peak / (448.0 if FLOATING else 127.5), HALF, BRAIN)
        scale = tl.where(scale == 0, tiny, scale)
        scale = tl.where(peak == peak, scale, peak)
    if BRAIN:  # no quotient of two bfloat16 lies near enough to a change of rounding for this to differ from dividing
        q = x * tl.div_rn(1.0, scale)
    else:
        q = tl.div_rn(x, scale + tl.zeros_like(x))
    q = rounded(q, HALF, BRAIN)
    if FLOATING:
        q = tl.minimum(tl.maximum(q, -448.0), 448.0)
        if TWIN:
            q = on_grid(q, 3, -6)
        tl.store(codes_ptr + token * K + k, q.to(tl.float8e4nv), mask=k < K)
    else:
        q = tl.minimum(tl.maximum(q, -128.0), 127.0)
        q = (q + 12582912.0) - 12582912.0  # 1.5 * 2^23: the sum has no room for a fraction, so halves go to even
        tl.store(codes_ptr + token * K + k, q.to(tl.int8), mask=k < K)
    tl.store(scale_ptr + token, scale)


@triton.jit
def largest(x, AXIS: tl.constexpr):
    """The largest magnitude of float32 `x` along an axis, NaN where there is one."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # which order as magnitudes do, NaN above all
    return tl.cast(tl.max(bits, AXIS), tl.float32, bitcast=True)


@triton.jit
def rounded(x, HALF: tl.constexpr, BRAIN: tl.constexpr):
    """float32 `x` rounded to the nearest float16 (HALF) or bfloat16 (BRAIN), as float32."""
    if HALF:
        x = x.to(tl.float16).to(tl.float32)
    if BRAIN:  # in integers, where the interpreter's conversion truncates
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def on_grid(x, MANTISSA: tl.constexpr, LEAST: tl.constexpr):
    """float32 `x` rounded to so many bits of mantissa, halves to even; below 2^LEAST steps stay the same."""
    power = tl.maximum(x.to(tl.uint32, bitcast=True) & 0x7F800000, (127 + LEAST) << 23)
    away = (power + ((23 - MANTISSA) << 23)).to(tl.float32, bitcast=True) * 1.5  # the sum has no room for more
    return (x + away) - away


def quantize(
    x: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
    input_scale: Tensor | None = None,
    floating: bool = False,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Codes [M, in] and scales float32 [M] of `x` [M, in], or of its RMSNorm with weight `norm` [in].

    Codes are int8, or float8_e4m3fn where `floating`. `input_scale` [1] is the scale of every token, where it is given.
    Rows of `x` are contiguous. `pdl` starts the kernel before its predecessor in the stream has finished (Hopper on).
    """
    tokens, features = x.shape
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn if floating else torch.int8)
    scale = torch.empty(tokens, dtype=torch.float32, device=x.device)
    width = triton.next_power_of_2(features)
    options = {"launch_pdl": True} if pdl else {}
    _quantize[(tokens,)](
        x, x if norm is None else norm, scale if input_scale is None else input_scale, codes, scale, features, eps,
        torch.finfo(x.dtype).eps, NORM=norm is not None, GIVEN=input_scale is not None, WIDTH=width, PDL=pdl,
        HALF=x.dtype == torch.float16, BRAIN=x.dtype == torch.bfloat16, FLOATING=floating, TWIN=not x.is_cuda,
        num_warps=min(32, max(1, width // 512)), **options,
    )  # fmt: skip
    return codes, scale
