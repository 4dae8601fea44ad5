"""Launches gemm.cu: many tokens, on the warpgroup matrix units (M > 16)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cuda import driver
from . import cuda_source
from .layout import Arranged

FEW = 32
"""Tokens of a tile up to which the parts of a cluster send each other their sums."""


@dataclass(frozen=True)
class GemmConfig:
    """How gemm.cu is specialised and launched; its header says what the names mean.

    `tail` tiles (cluster by cluster) of the result are made in `splits` parts of K; -1 is all of them. `exact` (0, 1)
    matters to 8-bit floating-point activations only, where no scales change along K.
    """

    tokens: int = 128
    stages: int = 4
    ways: int = 1
    pair: int = 1
    depth: int = 1
    per_sm: int = 1
    splits: int = 1
    tail: int = -1
    swizzle: int = 8
    exact: int = 1

    def shared_bytes(self, weight: Arranged) -> int:
        """Dynamic shared memory of a block."""
        inbox = self.tokens * 512 if self.tokens <= FEW and self.depth > 1 and self.ways == 1 else 0
        return self.stages * self.stage_bytes(weight) + inbox + 1024

    def stage_bytes(self, weight: Arranged) -> int:
        """What one stage takes of it."""
        grouped = bool(weight.group)
        scales = weight.scale_bytes if grouped else 0
        integer_zero = weight.zeros is not None and weight.zeros.dtype == torch.uint8
        zeros = 0 if weight.zeros is None or not grouped else 64 * weight.per_block if integer_zero else scales
        stage = self.tokens * (128 if weight.narrow else 256) + weight.bits * 2048 + scales + zeros
        stage += 4 * self.tokens if weight.has_block_scales else 0
        return -(-stage // 1024) * 1024

    def tiles(self, weight: Arranged, tokens: int) -> tuple[int, int]:
        """(tiles made in one part, tiles made in `splits` parts), in clusters."""
        total = -(-weight.row_tiles // self.pair) * -(-tokens // self.tokens)
        split = 0 if self.splits == 1 else total if self.tail < 0 else min(self.tail, total)
        return total - split, split

    def counters(self, weight: Arranged, tokens: int) -> int:
        """Tiles that are made in parts, each with a counter."""
        return self.tiles(weight, tokens)[1] * self.pair * self.depth


class _Plan(ctypes.Structure):
    _fields_ = [("whole", ctypes.c_int), ("splits", ctypes.c_int), ("swizzle", ctypes.c_int)]


def macros(weight: Arranged, dtype: torch.dtype, config: GemmConfig) -> dict[str, int]:
    """What gemm.cu is specialised by for results of `dtype`."""
    return cuda_source.variant(weight, dtype) | {
        "TOKENS": config.tokens,
        "STAGES": config.stages,
        "WAYS": config.ways,
        "PAIR": config.pair,
        "DEPTH": config.depth,
        "PER_SM": config.per_sm,
        "EXACT": int(weight.narrow and (weight.group > 0 or (weight.floating and config.exact > 0))),
    }


def gemm(
    x: Tensor,
    weight: Arranged,
    y: Tensor,
    config: GemmConfig,
    bias: Tensor | None,
    token_scale: Tensor | None,
    arrivals: Tensor | None,
    pdl: bool,
) -> None:
    """y [M, out] = x [M, in] weight^T (+ bias): `x` of y's dtype, or 8-bit with `token_scale` float32.

    `token_scale` is [M], or [blocks, `narrow.pitch(M)`] for a weight with scales of blocks.

    Rows of `x` are contiguous, 16-byte aligned and a multiple of 16 bytes long. `arrivals` int32, zero before and
    after, `config.counters` long: tiles made in parts count them there.
    """
    whole, split = config.tiles(weight, x.shape[0])
    workspace = None
    if split:
        columns = -(-config.tokens // 8 // config.depth // config.ways) * config.ways
        floats = split * config.pair * config.depth * config.splits * columns * 1024
        workspace = torch.empty(floats, dtype=torch.float32, device=x.device)
    shared = config.shared_bytes(weight)
    arguments = [
        cuda_source.token_map(x, config.tokens // config.pair),
        cuda_source.weights(weight),
        cuda_source.output(y, weight, bias, token_scale),
        driver.pointer(workspace),
        driver.pointer(arrivals),
        _Plan(whole, config.splits, config.swizzle),
    ]
    cluster, threads = config.pair * config.depth, 256 * config.ways + (128 if config.tokens > 128 else 32)
    shape = driver.Shape((cluster * (whole + split * config.splits), 1), threads, shared, cluster)
    cuda_source.kernel("gemm", macros(weight, y.dtype, config), shared).launch(shape, arguments, pdl)
