"""Sources of this folder's CUDA kernels, put together, specialised, compiled and loaded, once a device and shape."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..cuda import driver, nvrtc
from ..cuda.source import DEVICE, loaded, wgmma
from .layout import Arranged

_FOLDER = Path(__file__).parent
_PARTS = {
    "decode": ("common", "decode_tile"),
    "gemm": ("common", "gemm_tile", "gemm_numbers", "gemm_finish"),
    "quantize": (),
}
"""What comes in front of a kernel's own source, by its name."""


class Weights(ctypes.Structure):
    """`struct Weights` of decode.cu and gemm.cu."""

    _fields_ = [
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("blocks", ctypes.c_int),
        ("row_tiles", ctypes.c_int),
    ]


class Output(ctypes.Structure):
    """`struct Output` of decode.cu and gemm.cu."""

    _fields_ = [
        ("y", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("row_scale", ctypes.c_void_p),
        ("token_scale", ctypes.c_void_p),
        ("tokens", ctypes.c_int),
        ("rows", ctypes.c_int),
    ]


def weights(weight: Arranged) -> Weights:
    """The kernel's view of `weight`."""
    scales, zeros = (0 if tensor is None else tensor.data_ptr() for tensor in (weight.scales, weight.zeros))
    return Weights(weight.codes.data_ptr(), scales, zeros, weight.blocks, weight.row_tiles)


def output(y: Tensor, weight: Arranged, bias: Tensor | None, token_scale: Tensor | None) -> Output:
    """The kernel's view of its result [tokens, rows], and of what is applied on the way out."""
    return Output(
        y.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if weight.factors is None else weight.factors.data_ptr(),
        0 if token_scale is None else token_scale.data_ptr(),
        y.shape[0],
        y.shape[1],
    )


def token_map(x: Tensor, tokens: int) -> driver.TensorMap:
    """Boxes of `tokens` rows by 128 bytes of `x` [M, in]."""
    row = x.shape[1] * x.element_size()
    box = (128 // x.element_size(), tokens)
    return driver.tensor_map(x.data_ptr(), x.element_size(), (x.shape[1], x.shape[0]), (row,), box, True)


def variant(weight: Arranged, dtype: torch.dtype) -> dict[str, int]:
    """The macros of common.cuh for `weight` with results of `dtype`."""
    zero = 0 if weight.zeros is None else 1 if weight.zeros.dtype == torch.uint8 else 2
    half = int(dtype == torch.float16)
    return {
        "NARROW": int(weight.narrow),
        "FLOATING": int(weight.floating),
        "HALF": half,
        "BITS": weight.bits,
        "GROUPED": int(weight.group > 0),
        "NG": weight.per_block,
        "ZERO": zero,
    }


def kernel(name: str, macros: Mapping[str, int], shared_bytes: int) -> driver.Kernel:
    """The kernel `name` (decode, gemm, quantize) under `macros` for the current device, compiled at first use.

    Raises nvrtc.CompileError, and RuntimeError where the driver or NVRTC is missing.
    """
    return loaded(cubin, name, tuple(sorted(macros.items())), shared_bytes, torch.cuda.current_device())


def cubin(name: str, macros: Mapping[str, int], arch: str) -> bytes:
    """Machine code of the kernel `name` under `macros`; needs NVRTC, no GPU."""
    files = [_FOLDER / f"{part}.cuh" for part in _PARTS[name]] + [_FOLDER / f"{name}.cu"]
    instruction = wgmma(*_instruction(macros)) if name == "gemm" else ""
    return nvrtc.compile_cubin("\n".join([DEVICE, instruction, *(file.read_text() for file in files)]), macros, arch)


def _instruction(macros: Mapping[str, int]) -> tuple[int, str]:
    """The columns and the types of the matrix instruction of gemm.cu."""
    tokens = macros["TOKENS"]
    columns = tokens // 2 if macros["EXACT"] and tokens > 128 else tokens
    narrow, wide = ("e4m3" if macros["FLOATING"] else "s8"), ("f16" if macros["HALF"] else "bf16")
    return columns, narrow if macros["NARROW"] else wide
