"""Triton product of microscaled activations and weights for GPUs that multiply them as they are (`tl.dot_scaled`).

Codes lie as on disk, row after row: two E2M1 codes a byte, or E4M3; scales are E8M0 bytes of 32 inputs or E4M3 numbers
of 16. No layout of ours comes between, so a packed linear keeps its tensors. The emulated twin decodes both operands
and multiplies those: it is what the interpreter runs, whose own emulation knows no E4M3 scales.
"""

# What Triton compiles means other things than it says as Python.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_tiles import spread


@dataclass(frozen=True)
class Microscaled:
    """A matrix [rows, in]: `codes` uint8 [rows, in / 2] (E2M1, first code low) or float8_e4m3fn [rows, in]; `scales`
    uint8 [rows, in / 32] (E8M0) or float8_e4m3fn [rows, in / 16]."""

    codes: Tensor
    scales: Tensor

    @property
    def packed(self) -> int:
        """Codes in a byte."""
        return 2 if self.codes.dtype == torch.uint8 else 1

    @property
    def span(self) -> int:
        """Inputs that share a scale."""
        return 32 if self.scales.dtype == torch.uint8 else 16

    @property
    def inputs(self) -> int:
        """Width of the matrix."""
        return self.codes.shape[1] * self.packed


@triton.jit
def _gemm(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, factor_ptr, bias_ptr, y_ptr, M, N, K,
    FORMAT: tl.constexpr, PACKED: tl.constexpr, SPAN: tl.constexpr, FACTOR: tl.constexpr, BIAS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    byte, group = tl.arange(0, STEP // PACKED), tl.arange(0, STEP // SPAN)
    sums = tl.zeros((TOKENS, ROWS), tl.float32)
    for k in tl.range(0, K, STEP):
        x = part(x_ptr, m, k // PACKED + byte, M, K // PACKED)
        x_scale = part(x_scale_ptr, m, k // SPAN + group, M, K // SPAN)
        w = part(w_ptr, n, k // PACKED + byte, N, K // PACKED)
        w_scale = part(w_scale_ptr, n, k // SPAN + group, N, K // SPAN)
        if EMULATED:
            given, weight = decoded(x, x_scale, PACKED, SPAN, STEP), decoded(w, w_scale, PACKED, SPAN, STEP)
            sums += tl.dot(given, tl.trans(weight), input_precision="ieee")
        else:
            sums = tl.dot_scaled(x, x_scale, FORMAT, tl.trans(w), w_scale, FORMAT, sums)
    if FACTOR:
        sums *= tl.load(factor_ptr)
    if BIAS:
        sums += tl.load(bias_ptr + n, mask=n < N, other=0).to(tl.float32)[None, :]
    place = m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(y_ptr + place, sums.to(y_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def part(pointer, row, column, rows, columns):
    """[rows, columns] of a matrix that lies row after row; zeros outside of it."""
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    return tl.load(pointer + row[:, None].to(tl.int64) * columns + column[None, :], mask=inside, other=0.0)


@triton.jit
def decoded(codes, scales, PACKED: tl.constexpr, SPAN: tl.constexpr, STEP: tl.constexpr):
    """What codes and their scales stand for, float32 [rows, STEP]."""
    if PACKED == 2:
        nibbles = tl.join(codes & 15, codes >> 4).to(tl.int32)
        size = nibbles & 7
        value = tl.where(size < 2, size, ((2 | (size & 1)) << (size >> 1)) >> 1).to(tl.float32) * 0.5
        numbers = tl.reshape(tl.where(nibbles > 7, -value, value), (codes.shape[0], STEP))
    else:
        numbers = codes.to(tl.float32)
    if SPAN == 32:
        bits = tl.maximum(scales.to(tl.int32) << 23, 1 << 22)  # the least is a subnormal
        steps = bits.to(tl.float32, bitcast=True)
    else:
        steps = scales.to(tl.float32)
    return numbers * spread(steps, STEP // SPAN, STEP)


def gemm(
    x: Microscaled,
    weight: Microscaled,
    factor: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    emulated: bool | None = None,
) -> Tensor:
    """x weight^T times `factor` (float32 [1]) plus `bias`: [M, out] in `dtype`. Both are of one kind.

    `emulated` by default where there is no GPU. Raises ValueError for operands that do not fit each other.
    """
    if (x.packed, x.span, x.inputs) != (weight.packed, weight.span, weight.inputs):
        raise ValueError("both operands must be of one kind and one width")
    tokens, rows = x.codes.shape[0], weight.codes.shape[0]
    y = torch.empty(tokens, rows, dtype=dtype, device=x.codes.device)
    plain = not y.is_cuda if emulated is None else emulated
    tile = 16 if plain and tokens <= 16 else 128
    _gemm[(-(-rows // 128), -(-tokens // tile))](
        x.codes, x.scales, weight.codes, weight.scales, y if factor is None else factor, y if bias is None else bias, y,
        tokens, rows, x.inputs, FORMAT="e2m1" if x.packed == 2 else "e4m3", PACKED=x.packed, SPAN=x.span,
        FACTOR=factor is not None, BIAS=bias is not None, TOKENS=tile, ROWS=128, STEP=128, EMULATED=plain,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return y
