"""The bytes of a tensor, wherever it is, in chunks: so that files are copied and hashed without holding a tensor.

Files are read, not mapped: a mapping of a shard counts as resident memory and keeps the file open for as long as any
tensor made from it lives, which is what streaming one block at a time must avoid.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from .errors import InputError
from .headers import TensorInfo

CHUNK = 8 << 20


def chunks(source: Tensor | TensorInfo) -> Iterator[memoryview]:
    """The bytes of `source` in order, CHUNK at a time (so whole numbers), the last time what is left.

    A view is valid until the next one is asked for.
    """
    if isinstance(source, TensorInfo):
        yield from _stored_chunks(source)
        return
    flat = source.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    for begin in range(0, len(flat), CHUNK):
        yield flat[begin : begin + CHUNK]


def read_tensor(info: TensorInfo, device: str | torch.device = "cpu") -> Tensor:
    """The tensor at `info`, in fresh memory. Raises InputError when the file has changed since its header was read."""
    flat = torch.empty(info.nbytes, dtype=torch.uint8)
    with _opened(info.file) as stream:
        stream.seek(info.offset)
        _fill(stream, flat.numpy().data, info)
    return flat.view(info.dtype).reshape(info.shape).to(device)


def sha256_of(source: Tensor | TensorInfo) -> str:
    """Hex SHA-256 of the tensor's bytes."""
    digest = hashlib.sha256()
    for chunk in chunks(source):
        digest.update(chunk)
    return digest.hexdigest()


def sha256_of_file(file: Path) -> str:
    """Hex SHA-256 of a whole file."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK))
    with _opened(file) as stream:
        while got := stream.readinto(buffer):
            digest.update(buffer[:got])
    return digest.hexdigest()


def _stored_chunks(info: TensorInfo) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(CHUNK, info.nbytes)))
    with _opened(info.file) as stream:
        stream.seek(info.offset)
        for begin in range(0, info.nbytes, CHUNK):
            chunk = buffer[: info.nbytes - begin]
            _fill(stream, chunk, info)
            yield chunk


@contextmanager
def _opened(file: Path) -> Iterator[FileIO]:
    try:
        with open(file, "rb", buffering=0) as stream:
            yield stream
    except OSError as error:
        raise InputError(
            str(file), f"cannot be read ({error.strerror})", "check the path and its permissions"
        ) from error


def _fill(stream: FileIO, buffer: memoryview, info: TensorInfo) -> None:
    while buffer:
        got = stream.readinto(buffer)
        if not got:
            cause = f"it ends inside tensor '{info.name}'"
            raise InputError(str(info.file), cause, "leave the model alone while it is read")
        buffer = buffer[got:]
