"""Launches three_layer.cu (a handful of tokens) and three_layer_unpack.cu (the dense weight, for many)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..cuda import driver
from . import cuda_source
from .three_layer import PIECES, SLOTS, TILE_BYTES, ThreeLayer

MOST_TOKENS = 16
MOST_STAGES = 3


class _Layers(ctypes.Structure):
    """`struct Layers` of layers.cuh."""

    _fields_ = [
        ("tiles", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("rest", ctypes.c_void_p),
        ("outputs", ctypes.c_int),
        ("inputs", ctypes.c_int),
    ]


def variant(weight: ThreeLayer) -> dict[str, int]:
    """The macros that specialise the kernels for `weight`; as many stages as there is memory for."""
    cut = weight.cut
    room = (cuda_source.MOST_DYNAMIC // cut.warps - 2 * SLOTS) // TILE_BYTES
    return {
        "WARPS": cut.warps,
        "GROUPS": cut.groups,
        "TILES": cut.tiles,
        "STAGES": min(MOST_STAGES, room, cut.groups // PIECES * cut.tiles),
        "HALF": int(weight.dtype == torch.float16),
        "EXACT": int(weight.in_features == cut.inputs),
    }


def multiply(x: Tensor, weight: ThreeLayer, y: Tensor, bias: Tensor | None, pdl: bool) -> None:
    """y [M, out] = x [M, in] weight^T (+ bias), all of one dtype; M is at most MOST_TOKENS.

    Rows of `x` are contiguous, 16-byte aligned and a multiple of 16 bytes long.
    """
    macros = variant(weight) | {"NT": -(-x.shape[0] // 8)}
    shape = _shape(weight, macros["STAGES"])
    arguments = [driver.pointer(x), _view(weight), cuda_source.output(y, bias)]
    cuda_source.kernel("three_layer", macros, shape.shared_bytes).launch(shape, arguments, pdl)


def unpack(weight: ThreeLayer, pdl: bool) -> Tensor:
    """The dense weight [out, in], whose rows are a multiple of 16 bytes long."""
    dense = torch.empty(weight.out_features, weight.in_features, dtype=weight.dtype, device=weight.device)
    macros = variant(weight)
    shape = _shape(weight, macros["STAGES"])
    kernel = cuda_source.kernel("three_layer_unpack", macros, shape.shared_bytes)
    kernel.launch(shape, [_view(weight), driver.pointer(dense)], pdl)
    return dense


def _view(weight: ThreeLayer) -> _Layers:
    addresses = (tensor.data_ptr() for tensor in (weight.tiles, weight.starts, weight.rest))
    return _Layers(*addresses, weight.out_features, weight.in_features)


def _shape(weight: ThreeLayer, stages: int) -> driver.Shape:
    """A block a band of rows; its tiles, later the smaller sums of its warps, in shared memory."""
    warps = weight.cut.warps
    shared = warps * (stages * TILE_BYTES + 2 * SLOTS)
    return driver.Shape((weight.cut.bands(weight.out_features), 1), warps * 32, shared)
