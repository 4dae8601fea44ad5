"""Launches decode.cu (a handful of tokens) and unpack.cu (the dense weight, for many)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cuda import driver
from . import cuda_source
from .layout import Bitmap

MOST_TOKENS = 32
_FEW_TOKENS = 16  # up to which the sums and x of 16 warps find room in the registers
_ROOMY_WARPS = 8  # that have twice as many


def run(weight: Bitmap, tokens: int) -> int:
    """How many streams a warp goes through."""
    return 1 if tokens <= _FEW_TOKENS else -(-weight.cut.warps // _ROOMY_WARPS)


def macros(weight: Bitmap, tokens: int) -> dict[str, int]:
    """What decode.cu is specialised by for `tokens` tokens."""
    return cuda_source.variant(weight, run(weight, tokens)) | {"NT": -(-tokens // 8)}


def warps(weight: Bitmap, tokens: int) -> int:
    """Warps of a block."""
    return -(-weight.cut.warps // run(weight, tokens))


def shared_bytes(weight: Bitmap, tokens: int) -> int:
    """Dynamic shared memory of a block: the rings, later the warps' sums."""
    cut = weight.cut
    return max(cut.warps * cuda_source.RING_BYTES, cut.tiles * warps(weight, tokens) * -(-tokens // 8) * 512)


def decode(x: Tensor, weight: Bitmap, y: Tensor, bias: Tensor | None, pdl: bool) -> None:
    """y [M, out] = x [M, in] weight^T (+ bias), all of one dtype; M is at most MOST_TOKENS.

    Rows of `x` are contiguous, 16-byte aligned and a multiple of 16 bytes long.
    """
    shared = shared_bytes(weight, x.shape[0])
    shape = driver.Shape((weight.streams // weight.cut.warps, 1), warps(weight, x.shape[0]) * 32, shared)
    arguments = [
        driver.pointer(x),
        cuda_source.weights(weight),
        cuda_source.output(y, bias),
        cuda_source.picks(),
    ]
    cuda_source.kernel("decode", macros(weight, x.shape[0]), shared).launch(shape, arguments, pdl)


def unpack(weight: Bitmap, pdl: bool) -> Tensor:
    """The dense weight [out, in]."""
    dense = torch.empty(weight.out_features, weight.in_features, dtype=weight.values.dtype, device=weight.values.device)
    shared = weight.cut.warps * cuda_source.RING_BYTES
    shape = driver.Shape((weight.streams // weight.cut.warps, 1), weight.cut.warps * 32, shared)
    arguments = [cuda_source.weights(weight), driver.pointer(dense), cuda_source.picks()]
    cuda_source.kernel("unpack", cuda_source.variant(weight), shared).launch(shape, arguments, pdl)
    return dense
