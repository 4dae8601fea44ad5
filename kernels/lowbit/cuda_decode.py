"""Launches decode.cu: a handful of tokens, weights read once (M <= 16)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..cuda import driver
from . import cuda_source
from .layout import BLOCK, Arranged

MOST_TOKENS = 16
WIDE = 64  # inputs in 128 bytes


@dataclass(frozen=True)
class DecodeConfig:
    """How decode.cu is specialised (its header says what the names mean), and how tiles are dealt to `grid` blocks.

    `unit` tiles stay together; 1 balances better, 2 keeps the pairs whole. `spread` is 0 or 1, for floating-point codes
    with scales of groups and one token alone.
    """

    warps: int = 8
    pairs: int = 4
    depth: int = 2
    stages: int = 2
    cluster: int = 1
    unit: int = 1
    grid: int = 132
    spread: int = 1

    def shared_bytes(self, weight: Arranged, tokens: int) -> int:
        """Dynamic shared memory of a block."""
        sums = -(-tokens // 8) * 512  # of a tile
        partial = 2 * self.pairs * (self.warps * sums + 128)  # and what rows are times
        exchange = 4 * self.pairs * sums if self.cluster > 1 else 0
        scales = weight.scale_bytes // 8  # of a tile
        zeros = 0 if weight.zeros is None else 8 * weight.per_block if weight.zeros.dtype == torch.uint8 else scales
        slot = 2 * (weight.bits * 256 + scales + zeros)
        return partial + exchange + self.warps * (self.depth * slot + self.stages * 4 * sums) + 1024


def macros(weight: Arranged, dtype: torch.dtype, tokens: int, config: DecodeConfig) -> dict[str, int]:
    """What decode.cu is specialised by for `tokens` tokens with results of `dtype`."""
    return cuda_source.variant(weight, dtype) | {
        "NT": -(-tokens // 8),
        "WARPS": config.warps,
        "PAIRS": config.pairs,
        "DEPTH": config.depth,
        "XSTAGES": config.stages,
        "CLUSTER": config.cluster,
        "SPREAD": int(config.spread and tokens == 1 and weight.floating and weight.group > 0),
    }


def decode(x: Tensor, weight: Arranged, y: Tensor, config: DecodeConfig, bias: Tensor | None, pdl: bool) -> None:
    """y [M, out] = x [M, in] weight^T (+ bias), all of one dtype.

    Rows of `x` are contiguous, 16-byte aligned and a multiple of 16 bytes long. M is at most 16.
    """
    shared = config.shared_bytes(weight, x.shape[0])
    shape = driver.Shape((config.grid // config.cluster * config.cluster, 1), config.warps * 32, shared, config.cluster)
    if x.shape[1] % WIDE:
        x = pad(x, (0, -x.shape[1] % WIDE))
    arguments = [
        _boxes(x),
        cuda_source.weights(weight),
        cuda_source.output(y, weight, bias, None),
        ctypes.c_int(-(-weight.out_features // (16 * config.unit)) * config.unit),
        ctypes.c_int(config.unit),
    ]
    cuda_source.kernel("decode", macros(weight, y.dtype, x.shape[0], config), shared).launch(shape, arguments, pdl)


def _boxes(x: Tensor) -> driver.TensorMap:
    """A block's inputs of all tokens, as two boxes of 128-byte rows."""
    tokens, inputs = x.shape
    box = (WIDE, -(-tokens // 8) * 8, BLOCK // WIDE)
    return driver.tensor_map(x.data_ptr(), 2, (WIDE, tokens, inputs // WIDE), (inputs * 2, 128), box, True)
