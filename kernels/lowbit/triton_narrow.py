"""Triton product of 8-bit activations and weights in fragment order, integers or E4M3, scales applied on the way out.

Sums of a block of inputs are added outside the matrix units where they are floating-point, because inside they keep few
digits, and where blocks have scales of their own.
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
    x_ptr, token_scale_ptr, codes_ptr, row_scale_ptr, bias_ptr, y_ptr, M, N, K, blocks, pitch,
    BIAS: tl.constexpr, TOKENS: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, FLOATING: tl.constexpr,
    BLOCKS: tl.constexpr, WIDEN: tl.constexpr,
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
    sums = tl.zeros((TILES * 16, TOKENS), tl.float32 if FLOATING or BLOCKS else tl.int32)
    for block in tl.range(0, blocks, num_stages=STAGES):
        at = ((part // PARTS) * blocks + block).to(tl.int64) * 16384
        w = tl.reshape(tl.load(codes_ptr + at + lines), (TILES, 4, 8, 4, 2, 2, 4))
        w = tl.reshape(tl.permute(w, (0, 5, 2, 1, 4, 3, 6)), (TILES * 16, 128))  # tile, ph, r | step, kh, c, byte
        inputs = block * 128 + k
        mask = (m[None, :] < M) & (inputs[:, None] < K)
        x = tl.load(x_ptr + m[None, :].to(tl.int64) * K + inputs[:, None], mask=mask, other=0.0 if FLOATING else 0)
        if BLOCKS:
            scale = tl.load(token_scale_ptr + block * pitch + m.to(tl.int64), mask=m < M, other=0)
            scale *= tl.load(row_scale_ptr + (part // PARTS) * blocks + block)
            if WIDEN:
                sums += tl.dot(w.to(tl.float32), x.to(tl.float32), input_precision="ieee") * scale[None, :]
            else:
                sums += tl.dot(w, x, out_dtype=tl.float32 if FLOATING else tl.int32).to(tl.float32) * scale[None, :]
        elif WIDEN:  # the interpreter sums int8 products in int8; a block's sum is exact in float32
            sums += tl.dot(w.to(tl.float32), x.to(tl.float32), input_precision="ieee").to(sums.dtype)
        elif FLOATING:
            sums += tl.dot(w, x)
        else:
            sums = tl.dot(w, x, sums, out_dtype=tl.int32)
    y = sums.to(tl.float32)
    if not BLOCKS:
        scale = tl.load(row_scale_ptr + n, mask=n < N, other=0)
        y = y * (tl.load(token_scale_ptr + m, mask=m < M, other=0)[None, :] * scale[:, None])
    if BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0).to(tl.float32)[:, None]
    place = m[None, :].to(tl.int64) * N + n[:, None]
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=(m[None, :] < M) & (n[:, None] < N))


def gemm(x: Tensor, token_scale: Tensor, weight: Arranged, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [M, in] weight^T as [M, out] in `dtype`: sums in int32 or float32, times both scales in float32, plus bias.

    `x` is int8 or float8_e4m3fn, as the weight is; `token_scale` float32 [M], or [blocks, M or more] where the weight
    has scales of blocks; rows of `x` are contiguous. Raises ValueError for a weight of another layout.
    """
    scale = weight.scales if weight.has_block_scales else weight.factors
    if scale is None:
        raise ValueError("the weight was arranged for 16-bit activations")
    tokens, rows = x.shape[0], weight.out_features
    y = torch.empty(tokens, rows, dtype=dtype, device=x.device)
    token_tile = 16 if tokens <= 16 else 32 if tokens <= 32 else 64 if tokens <= 64 else 128
    tiles, warps = (4, 4) if tokens <= 64 else (8, 8)
    _gemm[(-(-rows // (16 * tiles)), -(-tokens // token_tile))](
        x, token_scale, weight.codes.view(x.dtype), scale, y if bias is None else bias, y,
        tokens, rows, weight.in_features, weight.blocks, token_scale.stride(0),
        BIAS=bias is not None, TOKENS=token_tile, TILES=tiles, STAGES=3, FLOATING=weight.floating,
        BLOCKS=weight.has_block_scales, WIDEN=not x.is_cuda, num_warps=warps,
    )  # fmt: skip
    return y
