"""The few calls of the CUDA driver that launching our own machine code takes, by ctypes on PyTorch's own library.

Kernels run on PyTorch's context and current stream, so that graph capture and the caching allocator see them as they
see PyTorch's own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_CLUSTER, _PROGRAMMATIC = 4, 6  # CUlaunchAttributeID
_MAX_DYNAMIC_SHARED = 8  # CUfunction_attribute
_UNSIGNED = {1: 0, 2: 1, 4: 2}  # CUtensorMapDataType by bytes
_SWIZZLE_128B, _PROMOTE_256B = 3, 3  # CUtensorMapSwizzle, CUtensorMapL2promotion


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The driver's library, or None on a machine without one."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _call(name: str, *arguments: object) -> None:
    lib = library()
    if lib is None:
        raise RuntimeError("the CUDA driver (libcuda.so.1) was not found")
    code = getattr(lib, name)(*arguments)
    if code != 0:
        text = ctypes.c_char_p()
        lib.cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{name} failed: {(text.value or b'unknown error').decode()} ({code})")


@dataclass(frozen=True)
class Shape:
    """How a kernel is launched: blocks, threads a block, dynamic shared memory in bytes, blocks a cluster along x."""

    grid: tuple[int, int]
    threads: int
    shared_bytes: int
    cluster: int = 1


class Kernel:
    """One function of loaded machine code, on the device that was current when it was loaded."""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int) -> None:
        torch.cuda.current_stream()  # makes PyTorch's context current on this thread
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _call("cuModuleLoadData", ctypes.byref(module), cubin)
        _call("cuModuleGetFunction", ctypes.byref(self._function), module, name.encode())
        _call("cuFuncSetAttribute", self._function, _MAX_DYNAMIC_SHARED, shared_bytes)

    def launch(self, shape: Shape, arguments: Sequence[ctypes._CData], programmatic: bool) -> None:  # pyright: ignore[reportPrivateUsage]
        """Enqueue on PyTorch's current stream. `programmatic` lets it start before its predecessor has finished.

        Raises RuntimeError with the driver's own words.
        """
        attributes = (_Attribute * 2)()
        count = 0
        if shape.cluster > 1:
            attributes[count].id = _CLUSTER
            attributes[count].value[0:3] = [shape.cluster, 1, 1]
            count += 1
        if programmatic:
            attributes[count].id = _PROGRAMMATIC
            attributes[count].value[0] = 1
            count += 1
        launch = _Launch(
            (*shape.grid, 1),
            (shape.threads, 1, 1),
            shape.shared_bytes,
            torch.cuda.current_stream().cuda_stream,
            attributes,
            count,
        )
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        _call("cuLaunchKernelEx", ctypes.byref(launch), self._function, pointers, None)


class TensorMap(ctypes.Structure):
    """The copy engine's description of a tensor (CUtensorMap); kernels take it by value, aligned to 64 bytes."""

    _fields_ = [("words", ctypes.c_uint64 * 16)]


@lru_cache(maxsize=4096)
def tensor_map(
    address: int,
    element_bytes: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzled: bool,
) -> TensorMap:
    """Boxes of a tensor at `address`: `sizes` in elements, innermost first; outside them copies bring zeros.

    `strides` in bytes of every dimension but the innermost; they and `address` are multiples of 16. `swizzled` boxes
    have innermost rows of 128 bytes, laid down in the 128-byte swizzle. Raises RuntimeError for a map that cannot be.
    """
    rank = len(sizes)
    buffer = ctypes.create_string_buffer(192)  # the driver wants the map itself on a 64-byte boundary
    place = (ctypes.addressof(buffer) + 63) // 64 * 64
    _call(
        "cuTensorMapEncodeTiled",
        ctypes.c_void_p(place),
        _UNSIGNED[element_bytes],
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*([1] * rank)),
        0,
        _SWIZZLE_128B if swizzled else 0,
        _PROMOTE_256B,
        0,
    )
    return TensorMap.from_buffer_copy(ctypes.string_at(place, 128))


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """A kernel's pointer argument; None becomes the null pointer."""
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())
