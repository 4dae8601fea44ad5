"""Bytes come back as they were, whatever the dtype, and reading holds nothing."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compress_llm.formats import tensor_bytes
from compress_llm.formats.errors import InputError
from compress_llm.formats.headers import DTYPES, read_header
from compress_llm.formats.tensor_bytes import chunks, read_tensor, sha256_of, sha256_of_file


def joined(source):
    return b"".join(bytes(chunk) for chunk in chunks(source))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("shape", [(5, 3), (), (0, 2)])
def test_round_trip(tmp_path, dtype, shape):
    count = torch.Size(shape).numel()
    raw = torch.randint(0, 2, (count * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape)
    save_file({"first": torch.ones(3, dtype=torch.int8), "t": tensor}, tmp_path / "m")
    info = read_header(tmp_path / "m").tensors["t"]
    back = read_tensor(info)
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert joined(back) == joined(info) == joined(tensor) == raw.numpy().tobytes()


def test_chunks_are_small_and_complete(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_bytes, "CHUNK", 7)
    tensor = torch.arange(50, dtype=torch.int16)
    save_file({"t": tensor}, tmp_path / "m")
    info = read_header(tmp_path / "m").tensors["t"]
    for source in (tensor, info):
        assert max(len(chunk) for chunk in chunks(source)) == 7
        assert joined(source) == tensor.numpy().tobytes()


def test_a_transposed_view_is_written_as_it_reads():
    tensor = torch.arange(6.0).reshape(2, 3).T
    assert joined(tensor) == tensor.contiguous().numpy().tobytes()


def test_hashes_are_of_the_bytes(tmp_path):
    tensor = torch.arange(9.0)
    save_file({"t": tensor}, tmp_path / "m")
    assert sha256_of(tensor) == hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    assert sha256_of(read_header(tmp_path / "m").tensors["t"]) == sha256_of(tensor)
    assert sha256_of_file(tmp_path / "m") == hashlib.sha256((tmp_path / "m").read_bytes()).hexdigest()


def test_reading_leaves_no_mapping_and_no_open_file(tmp_path):
    save_file({"t": torch.arange(100_000.0)}, tmp_path / "held.safetensors")
    tensor = read_tensor(read_header(tmp_path / "held.safetensors").tensors["t"])
    assert "held.safetensors" not in Path("/proc/self/maps").read_text()
    assert not any(
        "held.safetensors" in str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()
    )
    assert tensor[-1] == 99_999


def test_a_file_that_shrank_is_named(tmp_path):
    save_file({"t": torch.arange(100.0)}, tmp_path / "m")
    info = read_header(tmp_path / "m").tensors["t"]
    with open(tmp_path / "m", "r+b") as file:
        file.truncate(200)
    for action in (read_tensor, joined):
        with pytest.raises(InputError, match="ends inside tensor 't'"):
            action(info)
    (tmp_path / "m").unlink()
    with pytest.raises(InputError, match="cannot be read"):
        read_tensor(info)
