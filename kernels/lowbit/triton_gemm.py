"""Triton kernels over weights in fragment order with 16-bit activations: the product, and the decoder.

They serve where the CUDA C++ kernels cannot be built, and check them where they can. Scales go into the weights before
the product. Each step's product is added to the sums outside the matrix units: sums that stay in them across steps,
with A in registers, are what Triton 3.6 compiles to a race on Hopper.
"""

# What Triton compiles means other things than it says as Python.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import BLOCK, Arranged
from .triton_tiles import weight_block


@triton.jit
def _gemm(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, factors_ptr, bias_ptr, y_ptr, partial_ptr, M, N, K, blocks,
    BITS: tl.constexpr, GROUPED: tl.constexpr, NG: tl.constexpr, ZERO: tl.constexpr, FLOATING: tl.constexpr,
    HALF: tl.constexpr, BIAS: tl.constexpr, TOKENS: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    token_tile = tl.program_id(1)
    split = tl.program_id(2)
    m = token_tile * TOKENS + tl.arange(0, TOKENS)
    n = part * (TILES * 16) + tl.arange(0, TILES * 16)
    k = tl.arange(0, 128)
    sums = tl.zeros((TILES * 16, TOKENS), tl.float32)
    for block in tl.range(split * blocks // SPLITS, (split + 1) * blocks // SPLITS, num_stages=STAGES):
        w = weight_block(
            codes_ptr, scales_ptr, zeros_ptr, part, blocks, block,
            BITS, GROUPED, NG, ZERO, FLOATING, HALF, TILES, WARPS, PTX,
        )  # fmt: skip
        at = block * 128 + k
        x = tl.load(
            x_ptr + m[None, :].to(tl.int64) * K + at[:, None], mask=(m[None, :] < M) & (at[:, None] < K), other=0
        )
        if WIDEN:  # the interpreter has no bfloat16 product
            sums += tl.dot(w.to(tl.float32), x.to(tl.float32), input_precision="ieee")
        else:
            sums += tl.dot(w, x)
    if FLOATING:
        sums *= tl.load(factors_ptr + n, mask=n < N, other=0)[:, None]
    inside = (m[None, :] < M) & (n[:, None] < N)
    place = m[None, :].to(tl.int64) * N + n[:, None]
    if SPLITS > 1:
        tl.store(partial_ptr + split.to(tl.int64) * M * N + place, sums, mask=inside)
    else:
        if BIAS:
            sums += tl.load(bias_ptr + n, mask=n < N, other=0).to(tl.float32)[:, None]
        tl.store(y_ptr + place, sums.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dequantize(
    codes_ptr, scales_ptr, zeros_ptr, factors_ptr, w_ptr, N, K, blocks,
    BITS: tl.constexpr, GROUPED: tl.constexpr, NG: tl.constexpr, ZERO: tl.constexpr, FLOATING: tl.constexpr,
    HALF: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    block = tl.program_id(1)
    w = weight_block(
        codes_ptr, scales_ptr, zeros_ptr, part, blocks, block,
        BITS, GROUPED, NG, ZERO, FLOATING, HALF, TILES, WARPS, PTX,
    )  # fmt: skip
    n = part * (TILES * 16) + tl.arange(0, TILES * 16)
    if FLOATING:
        w = (w.to(tl.float32) * tl.load(factors_ptr + n, mask=n < N, other=0)[:, None]).to(w.dtype)
    k = block * 128 + tl.arange(0, 128)
    tl.store(w_ptr + n[:, None].to(tl.int64) * K + k[None, :], w, mask=(n[:, None] < N) & (k[None, :] < K))


def _meaning(weight: Arranged, dtype: torch.dtype) -> dict[str, int]:
    zero = 0 if weight.zeros is None else 1 if weight.zeros.dtype == torch.uint8 else 2
    grouped, half = weight.group > 0, dtype == torch.float16
    return {
        "BITS": weight.bits,
        "GROUPED": grouped,
        "NG": weight.per_block,
        "ZERO": zero,
        "FLOATING": weight.floating,
        "HALF": half,
    }


def _pointers(weight: Arranged) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales, zeros and factors; what a weight has not is never read, and its place is taken by the codes."""
    codes = weight.codes.view(torch.int32 if weight.floating else torch.int16)
    scales, zeros, factors = (
        codes if tensor is None else tensor for tensor in (weight.scales, weight.zeros, weight.factors)
    )
    return codes, scales, zeros, factors


def _splits(programs: int, blocks: int, device: torch.device) -> int:
    """Parts of K that fill the device about twice over, when the result alone has too few programs."""
    if device.type != "cuda":
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(2 * processors // programs, blocks // 4, 8))


def gemm(
    x: Tensor, weight: Arranged, bias: Tensor | None, splits: int | None = None, ptx: bool | None = None
) -> Tensor:
    """x [M, in] weight^T (+ bias) as [M, out] in the dtype of `x`, float16 or bfloat16; rows of `x` are contiguous.

    `splits` parts of K are summed in order, chosen by the device if None; `ptx` False leaves inline assembly out.
    """
    tokens, rows = x.shape[0], weight.out_features
    y = x.new_empty(tokens, rows)
    token_tile = 16 if tokens <= 16 else 32 if tokens <= 32 else 64 if tokens <= 64 else 128
    tiles, warps = (4, 4) if tokens <= 64 else (8, 8)
    grid = (-(-rows // (16 * tiles)), -(-tokens // token_tile))
    parts = splits or _splits(grid[0] * grid[1], weight.blocks, x.device)
    partial = y if parts == 1 else x.new_empty(parts, tokens, rows, dtype=torch.float32)
    _gemm[(*grid, parts)](
        x, *_pointers(weight), y if bias is None else bias, y, partial, tokens, rows, weight.in_features, weight.blocks,
        **_meaning(weight, x.dtype), BIAS=bias is not None, TOKENS=token_tile, TILES=tiles, WARPS=warps, SPLITS=parts,
        STAGES=3, PTX=x.is_cuda if ptx is None else ptx, WIDEN=not x.is_cuda, num_warps=warps,
    )  # fmt: skip
    if parts == 1:
        return y
    total = partial.sum(0)
    return (total if bias is None else total.add_(bias)).to(x.dtype)


def dequantize(weight: Arranged, dtype: torch.dtype, ptx: bool | None = None) -> Tensor:
    """The dense weight [out, in] in `dtype`, float16 or bfloat16."""
    dense = torch.empty(weight.out_features, weight.in_features, dtype=dtype, device=weight.codes.device)
    _dequantize[(-(-weight.out_features // BLOCK), weight.blocks)](
        *_pointers(weight), dense, *dense.shape, weight.blocks,
        **_meaning(weight, dtype), TILES=8, WARPS=4, PTX=dense.is_cuda if ptx is None else ptx, num_warps=4,
    )  # fmt: skip
    return dense
