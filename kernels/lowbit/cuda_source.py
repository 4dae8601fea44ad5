"""Sources of this folder's CUDA kernels, put together, specialised, compiled and loaded, once a device and shape."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ..cuda import driver, nvrtc
from .layout import Arranged

_FOLDER = Path(__file__).parent


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
    """The kernel `name` (decode, gemm) under `macros` for the current device, compiled at first use.

    Raises nvrtc.CompileError, and RuntimeError where the driver or NVRTC is missing.
    """
    return _kernel(name, tuple(sorted(macros.items())), shared_bytes, torch.cuda.current_device())


@cache
def _kernel(name: str, macros: tuple[tuple[str, int], ...], shared_bytes: int, device: int) -> driver.Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    return driver.Kernel(cubin(name, dict(macros), f"sm_{major}{minor}a"), name, shared_bytes)


def cubin(name: str, macros: Mapping[str, int], arch: str) -> bytes:
    """Machine code of the kernel `name` under `macros`; needs NVRTC, no GPU."""
    special = wgmma(*_instruction(macros)) if name == "gemm" else (_FOLDER / "decode_tile.cuh").read_text()
    parts = [(_FOLDER / "common.cuh").read_text(), special, (_FOLDER / f"{name}.cu").read_text()]
    return nvrtc.compile_cubin("\n".join(parts), macros, arch)


def _instruction(macros: Mapping[str, int]) -> tuple[int, str]:
    """The columns and the types of the matrix instruction of gemm.cu."""
    tokens = macros["TOKENS"]
    columns = tokens // 2 if macros["EXACT"] and tokens > 128 else tokens
    narrow, wide = ("e4m3" if macros["FLOATING"] else "s8"), ("f16" if macros["HALF"] else "bf16")
    return columns, narrow if macros["NARROW"] else wide


def wgmma(columns: int, kind: str) -> str:
    """The device function `wgmma` for 64 x `columns` sums, A in registers: the instruction names every register."""
    count = columns // 2
    inputs = 32 if kind in ("s8", "e4m3") else 16
    shape = f"k{inputs}.{'s32' if kind == 's8' else 'f32'}.{kind}.{kind}"
    signs = {"s8": "", "e4m3": ", 1, 1"}.get(kind, ", 1, 1, 0")  # of A and B; then whether B is transposed
    sums = ", ".join(f"%{i}" for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    held = ", ".join(f'"+{"r" if kind == "s8" else "f"}"(d[{i}])' for i in range(count))
    operation = f"wgmma.mma_async.sync.aligned.m64n{columns}{shape}"
    return (
        "DEVICE void wgmma(Sum* d, const u32* a, u64 b, bool add) {\n"
        f'  asm volatile("{{.reg .pred p;\\nsetp.ne.b32 p, %{count + 5}, 0;\\n'
        f'{operation} {{{sums}}}, {{{a}}}, %{count + 4}, p{signs};}}"\n'
        f'    : {held} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));\n}}\n'
    )
