"""Writes one safetensors file from tensors in memory and tensors that still lie in other files, without loading these.

The library's writer wants every tensor of a file in memory at once. This one streams, and gives the same bytes as the
library for the same tensors: entries and data by falling alignment, then by name, the header padded with spaces to a
multiple of 8 so that every tensor is aligned for its dtype.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from .headers import DTYPE_NAMES, LENGTH_BYTES, TensorInfo
from .tensor_bytes import chunks

ALIGNMENT = 8
METADATA = {"format": "pt"}  # transformers refuses files without it
RANK = {dtype: rank for rank, dtype in enumerate(DTYPE_NAMES)}


class Shaped(Protocol):
    """Anything of known dtype and shape: a Tensor, a TensorInfo, a Spec."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class Spec:
    """A tensor that does not exist yet."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def layout(tensors: Mapping[str, Shaped]) -> list[str]:
    """The names in the order in which a file holds them."""
    return sorted(tensors, key=lambda name: (RANK[tensors[name].dtype], name))


def encode_header(tensors: Mapping[str, Shaped]) -> bytes:
    """The JSON header of a file of `tensors`, padded, without the length before it."""
    entries: dict[str, object] = {"__metadata__": METADATA}
    end = 0
    for name in layout(tensors):
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    return text + b" " * (-len(text) % ALIGNMENT)


def container_bytes(tensors: Mapping[str, Shaped]) -> int:
    """Exact size of the file that holds `tensors`."""
    return LENGTH_BYTES + len(encode_header(tensors)) + sum(tensor.nbytes for tensor in tensors.values())


def split(tensors: Mapping[str, Shaped], max_shard_bytes: int) -> list[list[str]]:
    """The names of `tensors`, in their order, cut into shards of at most `max_shard_bytes` of data each.

    A tensor larger than that has a shard of its own.
    """
    shards: list[list[str]] = []
    room = -1
    for name, tensor in tensors.items():
        if not shards or tensor.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= tensor.nbytes
    return shards


def write_container(file: Path, tensors: Mapping[str, Tensor | TensorInfo]) -> dict[str, str]:
    """Write `tensors` to `file` and return the hex SHA-256 of each one's bytes. Raises OSError.

    At most one tensor at a time is copied from a device, and a few MiB from a file.
    """
    header = encode_header(tensors)
    hashes: dict[str, str] = {}
    with open(file, "wb") as stream:
        stream.write(len(header).to_bytes(LENGTH_BYTES, "little"))
        stream.write(header)
        for name in layout(tensors):
            digest = hashlib.sha256()
            for chunk in chunks(tensors[name]):
                digest.update(chunk)
                stream.write(chunk)
            hashes[name] = digest.hexdigest()
    return hashes
