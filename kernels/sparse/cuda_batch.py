"""Launches batch.cu: more tokens than decode.cu takes, a few dozen at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..cuda import driver
from ..cuda.arrivals import arrivals
from . import cuda_source
from .layout import Bitmap

TILES = (16, 32, 40, 48, 64)
"""Tokens that a block may take."""
_BANDS = 4  # to a group of warps
_MOST_SUMS, _ROOMY_SUMS = 64, 160  # that a thread has registers for: of 16 warps, of 8


@dataclass(frozen=True)
class BatchConfig:
    """How batch.cu is specialised; its header says what the names mean."""

    tokens: int
    ways: int
    run: int
    slots: int

    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: rings, x of two groups of inputs for each way, sums on their way."""
        rings = self.ways * self.run * _BANDS * cuda_source.RING_BYTES
        return rings + self.ways * 2 * self.tokens * 128 + self.slots * self.tokens * 256

    def grid(self, weight: Bitmap, tokens: int) -> tuple[int, int]:
        """(blocks along rows and K, tiles of tokens)."""
        bands = weight.streams // weight.cut.warps
        return -(-bands // _BANDS) * self.slices(weight), -(-tokens // self.tokens)

    def slices(self, weight: Bitmap) -> int:
        """Parts of K."""
        return -(-weight.cut.warps // (self.ways * self.run))


def configuration(weight: Bitmap, tokens: int) -> BatchConfig:
    """As few tiles of tokens as can be, no larger than they must; as many sums on their way as there is room for.

    Where sixteen warps lack the registers for the sums of all row tiles and tokens, eight with two streams each take
    their place.
    """
    cut = weight.cut
    roomy = 2 < cut.together == cut.tiles and cut.together * tokens > 2 * _MOST_SUMS
    sums = _ROOMY_SUMS if roomy else _MOST_SUMS
    most = max(size for size in TILES if cut.together * size <= 2 * sums)
    tiles = -(-tokens // most)
    tile = next(size for size in TILES if -(-tokens // tiles) <= size)
    run = min(2, cut.warps) if roomy else 1
    ways = min(4 // run, -(-cut.warps // run))
    two = BatchConfig(tile, ways, run, 2)
    return two if two.shared_bytes() <= cuda_source.MOST_DYNAMIC else BatchConfig(tile, ways, run, 1)


def macros(weight: Bitmap, config: BatchConfig) -> dict[str, int]:
    """What batch.cu is specialised by."""
    own = {"TOKENS": config.tokens, "WAYS": config.ways, "SLOTS": config.slots}
    return cuda_source.variant(weight, config.run) | own


def batch(x: Tensor, weight: Bitmap, y: Tensor, config: BatchConfig, bias: Tensor | None, pdl: bool) -> None:
    """y [M, out] = x [M, in] weight^T (+ bias), all of one dtype.

    Rows of `x` are contiguous, 16-byte aligned and a multiple of 16 bytes long.
    """
    grid, slices = config.grid(weight, x.shape[0]), config.slices(weight)
    workspace = counters = None
    if slices > 1:
        tile = weight.cut.tiles * config.tokens * 64  # floats of a block's result
        workspace = torch.empty(grid[0] * grid[1] * tile, dtype=torch.float32, device=x.device)
        counters = arrivals(x.device, grid[0] // slices * grid[1])
    shared = config.shared_bytes()
    arguments = [
        driver.pointer(x),
        cuda_source.weights(weight),
        cuda_source.output(y, bias),
        driver.pointer(workspace),
        driver.pointer(counters),
        cuda_source.picks(),
    ]
    shape = driver.Shape(grid, config.ways * 128, shared)
    cuda_source.kernel("batch", macros(weight, config), shared).launch(shape, arguments, pdl)
