"""Triton product of 8-bit activations and weights in fragment order, integers or E4M3, scales applied on the way out.

Sums of a block of inputs are added outside the matrix units where they are floating-point: inside they keep few digits.
"""

# What Triton compiles means other things than it says as Python.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import Arranged


@triton.jit
def _gemm(
    x_ptr, token_scale_ptr, codes_ptr, row_scale_ptr, bias_ptr, y_ptr, M, N, K, blocks,
    BIAS: tl.constexpr, TOKENS: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, FLOATING: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    token_tile = tl.program_id(1)
    PARTS: tl.constexpr = 8 // TILES
    m = token_tile * TOKENS + tl.arange(0, TOKENS)
    row = tl.arange(0, TILES * 16)
    n = part * (TILES * 16) + row
    k = tl.arange(0, 128)
    line = ((part % PARTS) * TILES * 64 + tl.arange(0, TILES * 64)) * 32  # tile, step, r, two lanes: 32 bytes each
    lines = line[:, None] + tl.arange(0, 32)[None, :]
    sums = tl.zeros((TILES * 16, TOKENS), tl.float32 if FLOATING else tl.int32)
    for block in tl.range(0, blocks, num_stages=STAGES):
        at = ((part // PARTS) * blocks + block).to(tl.int64) * 16384
        w = tl.reshape(tl.load(codes_ptr + at + lines), (TILES, 4, 8, 4, 2, 2, 4))
        w = tl.reshape(tl.permute(w, (0, 5, 2, 1, 4, 3, 6)), (TILES * 16, 128))  # tile, ph, r | step, kh, c, byte
        inputs = block * 128 + k
        mask = (m[None, :] < M) & (inputs[:, None] < K)
        x = tl.load(x_ptr + m[None, :].to(tl.int64) * K + inputs[:, None], mask=mask, other=0.0 if FLOATING else 0)
        if WIDEN:  # the interpreter sums int8 products in int8; a block's sum is exact in float32
            sums += tl.dot(w.to(tl.float32), x.to(tl.float32), input_precision="ieee").to(sums.dtype)
        elif FLOATING:
            sums += tl.dot(w, x)
        else:
            sums = tl.dot(w, x, sums, out_dtype=tl.int32)
    scale = tl.load(row_scale_ptr + n, mask=n < N, other=0)
    y = sums.to(tl.float32) * (tl.load(token_scale_ptr + m, mask=m < M, other=0)[None, :] * scale[:, None])
    if BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0).to(tl.float32)[:, None]
    place = m[None, :].to(tl.int64) * N + n[:, None]
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=(m[None, :] < M) & (n[:, None] < N))


def gemm(x: Tensor, token_scale: Tensor, weight: Arranged, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [M, in] weight^T as [M, out] in `dtype`: sums in int32 or float32, times both scales in float32, plus bias.

    `x` is int8 or float8_e4m3fn, as the weight is; `token_scale` float32 [M]; rows of `x` are contiguous.
    """
    if weight.factors is None:
        raise ValueError("the weight was arranged for 16-bit activations")
    tokens, rows = x.shape[0], weight.out_features
    y = torch.empty(tokens, rows, dtype=dtype, device=x.device)
    token_tile = 16 if tokens <= 16 else 32 if tokens <= 32 else 64 if tokens <= 64 else 128
    tiles, warps = (4, 4) if tokens <= 64 else (8, 8)
    _gemm[(-(-rows // (16 * tiles)), -(-tokens // token_tile))](
        x, token_scale, weight.codes.view(x.dtype), weight.factors, y if bias is None else bias, y,
        tokens, rows, weight.in_features, weight.blocks,
        BIAS=bias is not None, TOKENS=token_tile, TILES=tiles, STAGES=3, FLOATING=weight.floating,
        WIDEN=not x.is_cuda, num_warps=warps,
    )  # fmt: skip
    return y
