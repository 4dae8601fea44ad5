"""Triton kernels over sparse weights: the product, and the dense weight, a step of a stream expanded at a time.

They serve where the CUDA C++ kernels cannot be built, and check them where they can. A program reads a stream as a warp
does (layout.py), without the ring: every value by its own address, which costs most of the speed. Sums of streams side
by side are added in order.
"""

# What Triton compiles means other things than it says as Python.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from .layout import Bitmap

MOST_TOKENS = 64  # beyond, the weight is expanded once
_MOST_SUMS = 128  # of a row: row tiles together times tokens


@triton.jit
def _expanded(
    masks_ptr, values_ptr, table_ptr, stream, tail, step, byte, there, taken, turn, STEPS: tl.constexpr,
    WORDS: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """A step [32 lanes, 32] of a stream, and what its lanes have taken and how far they have moved since the start.

    Where `there` is not positive it is no step, and nothing but zeros.
    """
    lane = tl.arange(0, 32)
    i = tl.arange(0, 32)
    word = tl.load(masks_ptr + (stream * STEPS + step).to(tl.int64) * 32 + lane, mask=lane < there * 32, other=0)
    move = tl.load(table_ptr + stream.to(tl.int64) * (WORDS * 4) + byte, mask=there > 0, other=0).to(tl.int32) & 31
    taken = tl.gather(taken, (lane + move) % 32, 0)
    turn = (turn + move) % 32
    bit = (word[:, None] >> ((i + 3) % 32)[None, :]) & 1
    number = taken[:, None] + tl.cumsum(bit, 1) - bit
    place = (number >> 1) * 64 + ((lane + turn) % 32 * 2)[:, None] + (number & 1)
    front = stream.to(tl.int64) * (HEAD * 1024)
    at = tl.where(place < HEAD * 1024, front, tail - HEAD * 1024) + place
    values = tl.load(values_ptr + at, mask=bit == 1, other=0)
    return values, taken + tl.sum(bit, 1), turn


@triton.jit
def _product(
    x_ptr, masks_ptr, values_ptr, starts_ptr, table_ptr, partial_ptr, M, N, K, streams,
    WARPS: tl.constexpr, GROUPS: tl.constexpr, TILES: tl.constexpr, TOGETHER: tl.constexpr, UNROLL: tl.constexpr,
    WORDS: tl.constexpr, HEAD: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    SETS: tl.constexpr = (TILES + TOGETHER - 1) // TOGETHER
    stream = tl.program_id(0)
    band, warp = stream // WARPS, stream % WARPS
    tail = (streams * (HEAD * 16) + tl.load(starts_ptr + stream)).to(tl.int64) * 64
    m = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    k = tl.arange(0, 64)
    slot = tl.arange(0, WIDTH)[:, None, None]  # of the row tiles of a set
    taken = tl.zeros((32,), tl.int32)
    turn = 0
    step = 0
    for part in range(SETS):
        size = tl.minimum(TILES - TOGETHER * part, TOGETHER)
        sums = tl.zeros((WIDTH, 16, TOKENS), tl.float32)
        for group in range(GROUPS):
            at = (warp * GROUPS + group) * 64 + k
            x = tl.load(
                x_ptr + m[None, :].to(tl.int64) * K + at[:, None], mask=(m[None, :] < M) & (at[:, None] < K), other=0
            )
            for tile in range(TOGETHER):
                byte = (part * GROUPS + group) // UNROLL * (4 * WORDS) + group % UNROLL * size + tile
                values, taken, turn = _expanded(
                    masks_ptr, values_ptr, table_ptr, stream, tail, step + tile, byte, size - tile, taken, turn,
                    TILES * GROUPS, SETS * (GROUPS // UNROLL) * WORDS, HEAD,
                )  # fmt: skip
                w = tl.reshape(values, (8, 4, 2, 2, 2, 4))  # r, c, half of the inputs, j % 2, h, e
                w = tl.reshape(tl.permute(w, (4, 0, 2, 1, 3, 5)), (16, 64))
                if WIDEN:  # the interpreter has no bfloat16 product
                    more = tl.dot(w.to(tl.float32), x.to(tl.float32), input_precision="ieee")
                else:
                    more = tl.dot(w, x)
                sums += tl.where(slot == tile, more[None, :, :], 0.0)
            step += size
        n = (band * TILES + TOGETHER * part + slot) * 16 + tl.arange(0, 16)[None, :, None]
        place = (warp * M + m[None, None, :]).to(tl.int64) * N + n
        tl.store(partial_ptr + place, sums, mask=(slot < size) & (m[None, None, :] < M) & (n < N))


@triton.jit
def _unpack(
    masks_ptr, values_ptr, starts_ptr, table_ptr, dense_ptr, N, K, streams,
    WARPS: tl.constexpr, GROUPS: tl.constexpr, TILES: tl.constexpr, TOGETHER: tl.constexpr, UNROLL: tl.constexpr,
    WORDS: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    SETS: tl.constexpr = (TILES + TOGETHER - 1) // TOGETHER
    stream = tl.program_id(0)
    band, warp = stream // WARPS, stream % WARPS
    tail = (streams * (HEAD * 16) + tl.load(starts_ptr + stream)).to(tl.int64) * 64
    lane = tl.arange(0, 32)[:, None]
    i = tl.arange(0, 32)[None, :]
    taken = tl.zeros((32,), tl.int32)
    turn = 0
    for step in range(TILES * GROUPS):
        part = step // (TOGETHER * GROUPS)
        size = tl.minimum(TILES - TOGETHER * part, TOGETHER)
        group = (step - part * TOGETHER * GROUPS) // size
        tile = (step - part * TOGETHER * GROUPS) % size
        byte = (part * GROUPS + group) // UNROLL * (4 * WORDS) + group % UNROLL * size + tile
        values, taken, turn = _expanded(
            masks_ptr, values_ptr, table_ptr, stream, tail, step, byte, 1, taken, turn,
            TILES * GROUPS, SETS * (GROUPS // UNROLL) * WORDS, HEAD,
        )  # fmt: skip
        n = (band * TILES + TOGETHER * part + tile) * 16 + i // 4 % 2 * 8 + lane // 4
        k = (warp * GROUPS + group) * 64 + i // 16 * 32 + lane % 4 * 8 + i // 8 % 2 * 4 + i % 4
        tl.store(dense_ptr + n.to(tl.int64) * K + k, values, mask=(n < N) & (k < K))


def _cut(weight: Bitmap) -> dict[str, int]:
    cut = weight.cut
    own = {"TOGETHER": cut.together, "UNROLL": cut.unroll, "WORDS": cut.words, "HEAD": weight.head}
    return {"WARPS": cut.warps, "GROUPS": cut.groups, "TILES": cut.tiles} | own


def unpack(weight: Bitmap) -> Tensor:
    """The dense weight [out, in]."""
    dense = weight.values.new_empty(weight.out_features, weight.in_features)
    _unpack[(weight.streams,)](
        weight.masks, weight.values, weight.starts, weight.table.view(torch.uint8), dense, *dense.shape, weight.streams,
        **_cut(weight), num_warps=1,
    )  # fmt: skip
    return dense


def product(x: Tensor, weight: Bitmap, bias: Tensor | None) -> Tensor:
    """x [M, in] weight^T (+ bias) as [M, out] in the dtype of `x`, that of the weight; rows of `x` are contiguous."""
    tokens, rows = x.shape[0], weight.out_features
    if tokens > MOST_TOKENS:
        return linear(x, unpack(weight), bias)
    partial = x.new_empty(weight.cut.warps, tokens, rows, dtype=torch.float32)
    width = 1 << (weight.cut.together - 1).bit_length()
    tile = next(size for size in (16, 32, 64) if tokens <= size or width * size >= _MOST_SUMS)
    _product[(weight.streams, -(-tokens // tile))](
        x, weight.masks, weight.values, weight.starts, weight.table.view(torch.uint8), partial, *x.shape[:1], rows,
        weight.in_features, weight.streams, **_cut(weight), TOKENS=tile, WIDTH=width,
        WIDEN=not x.is_cuda, num_warps=1,
    )  # fmt: skip
    total = partial.sum(0)
    return (total if bias is None else total.add_(bias)).to(x.dtype)
