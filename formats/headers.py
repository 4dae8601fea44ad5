"""Reads and proves the header of one safetensors file, so that a lying or truncated shard is refused before any work.

The library checks much of this too, but it maps the whole file to do so and answers with its own exceptions; planning
needs headers only, and an error that names the file, the tensor and the fix. The layout (format specification of
safetensors): 8 bytes little-endian header length N, N bytes JSON, then the tensors' bytes back to back without holes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import InputError

# In the order in which the library lays tensors out in a file, widest alignment first.
DTYPES: dict[str, torch.dtype] = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
LENGTH_BYTES = 8
MAX_HEADER = 100_000_000  # the library's own limit
AGAIN = "download or copy the file again"


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `nbytes` bytes of `file` from byte `offset` (counted from the start of the file)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    offset: int


@dataclass(frozen=True)
class Header:
    """The proven header of `file`: every tensor lies inside the file, and they cover its data without gap or overlap.

    `tensors` are in the order of their bytes; `raw` is the JSON as stored, padding included.
    """

    file: Path
    raw: bytes
    metadata: dict[str, str]
    tensors: dict[str, TensorInfo]


def read_header(file: Path) -> Header:
    """The header of `file`. Reads nothing behind it. Raises InputError that names the fault."""
    raw, size = _read_raw(file)
    fields = _parse(file, raw)
    metadata = _metadata(file, fields.pop("__metadata__", {}))
    start = LENGTH_BYTES + len(raw)
    infos = [_tensor(file, name, entry, start) for name, entry in fields.items()]
    infos.sort(key=lambda info: (info.offset, info.nbytes))
    _prove_cover(file, infos, start, size)
    return Header(file, raw, metadata, {info.name: info for info in infos})


def _read_raw(file: Path) -> tuple[bytes, int]:
    """The header's bytes and the size of the whole file."""
    try:
        with open(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES + 2:
                raise InputError(str(file), f"{size} bytes are too few for a safetensors file", AGAIN)
            if length > MAX_HEADER:
                raise InputError(
                    str(file), f"it claims a header of {length} bytes, so it is no safetensors file", AGAIN
                )
            if LENGTH_BYTES + length > size:
                raise InputError(str(file), f"its header of {length} bytes ends after the file ({size} bytes)", AGAIN)
            return stream.read(length), size
    except OSError as error:
        raise InputError(
            str(file), f"cannot be read ({error.strerror})", "check the path and its permissions"
        ) from error


def _parse(file: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in fields if names.count(name) > 1)
            raise InputError(str(file), f"its header names '{twice}' twice", AGAIN)
        return fields

    try:
        fields = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise InputError(str(file), f"its header is not valid JSON ({error})", AGAIN) from error
    if not isinstance(fields, dict):
        raise InputError(str(file), "its header is not a JSON object", AGAIN)
    return fields


def _metadata(file: Path, metadata: object) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InputError(str(file), "its __metadata__ is not a map from string to string", AGAIN)
    return metadata


def _tensor(file: Path, name: str, entry: object, start: int) -> TensorInfo:
    """One entry of the header, proven in itself: a known dtype, and a shape that fills its span exactly."""
    key = f"{file}: tensor '{name}'"
    if not isinstance(entry, Mapping) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise InputError(key, "its header entry lacks dtype, shape or data_offsets", AGAIN)
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise InputError(key, f"dtype {entry['dtype']!r} is not supported", "convert it to one of " + ", ".join(DTYPES))
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _naturals(shape):
        raise InputError(key, f"its shape {shape!r} is not a list of sizes", AGAIN)
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise InputError(key, f"its data_offsets {offsets!r} are not a begin and an end", AGAIN)
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes != offsets[1] - offsets[0]:
        span = offsets[1] - offsets[0]
        raise InputError(key, f"{entry['dtype']} {shape} takes {nbytes} bytes, but its offsets span {span}", AGAIN)
    return TensorInfo(name, dtype, tuple(shape), nbytes, file, start + offsets[0])


def _naturals(value: object) -> bool:
    """Whether `value` is a list of integers from 0 up (JSON's true is no integer here)."""
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _prove_cover(file: Path, infos: list[TensorInfo], start: int, size: int) -> None:
    """Sorted by place, each tensor must begin where the last one ended, and the last end is the end of the file."""
    end = start
    for info in infos:
        if info.offset + info.nbytes > size:
            raise InputError(str(file), f"it is truncated: tensor '{info.name}' ends after the file's last byte", AGAIN)
        if info.offset != end:
            fault = "overlaps the tensor before it" if info.offset < end else "leaves a hole before it"
            raise InputError(f"{file}: tensor '{info.name}'", fault, AGAIN)
        end += info.nbytes
    if end != size:
        raise InputError(str(file), f"{size - end} bytes after its last tensor belong to none", AGAIN)
