"""Sources of this folder's CUDA kernels, specialised by how a weight is cut, compiled and loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..cuda import driver, nvrtc
from ..cuda.source import DEVICE, loaded, wgmma
from .layout import RING, Bitmap

_FOLDER = Path(__file__).parent
RING_BYTES = RING * 2048 + 256
"""Shared memory of a warp's ring."""
MOST_DYNAMIC = (227 << 10) - 2048
"""Bytes of shared memory a block may ask for beside what the kernels declare."""
_WALKS = {"three_layer": "layers.cuh", "three_layer_unpack": "layers.cuh"}
"""How a kernel's warps go through the weight, where it is not stream.cuh."""


class _Weights(ctypes.Structure):
    """`struct Bitmap` of stream.cuh."""

    _fields_ = [
        ("masks", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("streams", ctypes.c_int),
        ("outputs", ctypes.c_int),
        ("inputs", ctypes.c_int),
    ]


class _Output(ctypes.Structure):
    """`struct Output` of tokens.cuh."""

    _fields_ = [("y", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("tokens", ctypes.c_int)]


class _Picks(ctypes.Structure):
    """`struct Picks` of stream.cuh."""

    _fields_ = [("byte", ctypes.c_uint * 4), ("position", ctypes.c_uint), ("shift", ctypes.c_uint)]


def weights(weight: Bitmap) -> _Weights:
    """The kernels' view of `weight`."""
    tensors = (weight.masks, weight.values, weight.starts, weight.table)
    addresses = (tensor.data_ptr() for tensor in tensors)
    return _Weights(*addresses, weight.streams, weight.out_features, weight.in_features)


def output(y: Tensor, bias: Tensor | None) -> _Output:
    """The kernels' view of their result [tokens, out]."""
    return _Output(y.data_ptr(), 0 if bias is None else bias.data_ptr(), y.shape[0])


def picks() -> _Picks:
    """The numbers that kernels take as arguments; stream.cuh says why."""
    return _Picks((ctypes.c_uint * 4)(1, 1 << 8, 1 << 16, 1 << 24), 64 << 8, 16 << 8)


def variant(weight: Bitmap, run: int = 1) -> dict[str, int]:
    """The macros that specialise the kernels for `weight` and warps that go through `run` streams each."""
    cut = weight.cut
    return {
        "WARPS": cut.warps,
        "GROUPS": cut.groups,
        "TILES": cut.tiles,
        "TOGETHER": cut.together,
        "UNROLL": cut.unroll,
        "RUN": run,
        "HEAD": weight.head,
        "RING": RING,
        "HALF": int(weight.values.dtype == torch.float16),
        "EXACT": int(weight.in_features == cut.inputs),
    }


def kernel(name: str, macros: Mapping[str, int], shared_bytes: int) -> driver.Kernel:
    """The kernel `name`, that of a source here, under `macros` for the current device, compiled at first use.

    Raises nvrtc.CompileError, and RuntimeError where the driver or NVRTC is missing.
    """
    return loaded(cubin, name, tuple(sorted(macros.items())), shared_bytes, torch.cuda.current_device())


def cubin(name: str, macros: Mapping[str, int], arch: str) -> bytes:
    """Machine code of the kernel `name` under `macros`; needs NVRTC, no GPU."""
    kind = "f16" if macros["HALF"] else "bf16"
    special = f"typedef float Sum;\n{wgmma(macros['TOKENS'], kind)}" if "TOKENS" in macros else ""
    files = (_WALKS.get(name, "stream.cuh"), "tokens.cuh", f"{name}.cu")
    walk, tokens, kernel = (_FOLDER.joinpath(file).read_text() for file in files)
    return nvrtc.compile_cubin("\n".join([DEVICE, walk, tokens, special, kernel]), macros, arch)
