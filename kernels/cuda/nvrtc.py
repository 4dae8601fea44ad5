"""Compiles CUDA C++ source to machine code at first use, with the NVRTC library that PyTorch ships.

No toolkit, headers or build step are needed: sources include nothing. The machine code is cached on disk under the hash
of everything it depends on (source, options, architecture, compiler version), so that a process pays the compiler only
once on a machine. `COMPRESS_KERNEL_CACHE` moves the cache. Compiling needs no GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

CACHE_VARIABLE = "COMPRESS_KERNEL_CACHE"


class CompileError(RuntimeError):
    """NVRTC refused a source; the message is its log."""


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The NVRTC library, or None where there is none: PyTorch's own wheels first, then the system's search path."""
    names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in spec.submodule_search_locations or ()] if spec else []
    bundled = [
        str(path) for root in roots for path in sorted(root.glob("*/lib/libnvrtc.so.*")) if ".alt" not in path.name
    ]
    for name in [*bundled, *names]:
        try:
            for builtins in Path(name).parent.glob("libnvrtc-builtins.so.*[0-9]") if "/" in name else ():
                ctypes.CDLL(str(builtins))  # NVRTC opens it by bare name: it must be loaded by then
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def version() -> tuple[int, int]:
    """(major, minor) of the NVRTC library. Raises RuntimeError where there is none."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_needed().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def cache_directory() -> Path:
    """Where machine code is kept: $COMPRESS_KERNEL_CACHE, else compress_llm/kernels in the user's cache directory."""
    if CACHE_VARIABLE in os.environ:
        return Path(os.environ[CACHE_VARIABLE])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "compress_llm" / "kernels"


def compile_cubin(source: str, macros: Mapping[str, int], arch: str) -> bytes:
    """Machine code for `arch` ("sm_90a") of `source` under `macros`, from the cache where it is there.

    Raises CompileError with the compiler's log, and RuntimeError where NVRTC is missing.
    """
    options = [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        *(f"-D{name}={value}" for name, value in sorted(macros.items())),
    ]
    key = hashlib.sha256("\0".join([source, *options, repr(version())]).encode()).hexdigest()
    path = cache_directory() / f"{key}.cubin"
    if path.is_file():
        return path.read_bytes()
    cubin = _compile(source, options)
    _keep(path, cubin)
    return cubin


def _keep(path: Path, cubin: bytes) -> None:
    """Writes the cache entry whole or not at all; a cache that cannot be written only costs the next compilation."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(cubin)
        os.replace(file.name, path)
    except OSError:
        return


def _needed() -> ctypes.CDLL:
    found = library()
    if found is None:
        raise RuntimeError("libnvrtc was not found: install a CUDA build of PyTorch, or nvidia-cuda-nvrtc")
    return found


def _check(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"NVRTC returned error {code}")


def _compile(source: str, options: list[str]) -> bytes:
    lib, program = _needed(), ctypes.c_void_p()
    _check(lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None))
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if lib.nvrtcCompileProgram(program, len(options), given) != 0:
            raise CompileError(
                _text(lib.nvrtcGetProgramLogSize, lib.nvrtcGetProgramLog, program).decode(errors="replace")
            )
        return _text(lib.nvrtcGetCUBINSize, lib.nvrtcGetCUBIN, program)
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _text(size_of: ctypes._FuncPointer, get: ctypes._FuncPointer, program: ctypes.c_void_p) -> bytes:  # pyright: ignore[reportPrivateUsage]
    """One of NVRTC's outputs: its size is asked for, then its bytes."""
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(get(program, buffer))
    return buffer.raw
