"""Every way in which a safetensors header can lie is found, and named."""

import json
import re
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

from compress_llm.formats.errors import InputError
from compress_llm.formats.headers import DTYPES, read_header

TWO = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "I8", "shape": [3], "data_offsets": [8, 11]},
}


def stored(path, fields, data=b"x" * 11, length=None):
    """A file with the header `fields` (JSON text or object)."""
    text = (fields if isinstance(fields, str) else json.dumps(fields)).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def changed(name, **entry):
    return {**TWO, name: {**TWO[name], **entry}}


def test_reads_what_the_library_wrote(tmp_path):
    tensors = {
        "b": torch.arange(6, dtype=torch.int32).reshape(2, 3),
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "flag": torch.tensor([True, False]),
        "e4m3": torch.zeros(3).to(torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "m.safetensors")
    assert header.metadata == {"format": "pt"}
    assert {name: (info.dtype, info.shape) for name, info in header.tensors.items()} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    data = (tmp_path / "m.safetensors").read_bytes()
    b = header.tensors["b"]
    assert data[b.offset : b.offset + b.nbytes] == tensors["b"].numpy().tobytes()


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ("[]", "not a JSON object"),
        ('{"a": ', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"a": 1, "a": 2}', "names 'a' twice"),
        ('{"a": {"dtype": "I8", "dtype": "U8"}}', "names 'dtype' twice"),
        ({"__metadata__": {"n": 1}, **TWO}, "__metadata__"),
        ({"a": 1}, "lacks dtype"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "lacks dtype"),
        (changed("a", dtype="F4"), "'F4' is not supported"),
        (changed("a", dtype=["F32"]), "is not supported"),
        (changed("a", shape=[-2]), "not a list of sizes"),
        (changed("a", shape=[True, 2]), "not a list of sizes"),
        (changed("a", shape=2), "not a list of sizes"),
        (changed("a", shape=[2.0]), "not a list of sizes"),
        (changed("a", data_offsets=[8, 0]), "not a begin and an end"),
        (changed("a", data_offsets=[0, 8, 9]), "not a begin and an end"),
        (changed("a", shape=[3]), "takes 12 bytes, but its offsets span 8"),
        (changed("b", dtype="I16"), "takes 6 bytes, but its offsets span 3"),
        (changed("b", data_offsets=[4, 7]), "overlaps"),
        (changed("b", data_offsets=[0, 3]), "overlaps"),
        (changed("b", shape=[2], data_offsets=[9, 11]), "leaves a hole"),
        (changed("b", shape=[4], data_offsets=[8, 12]), "truncated: tensor 'b'"),
        (changed("b", shape=[1 << 62], data_offsets=[8, 8 + (1 << 62)]), "truncated: tensor 'b'"),
        (changed("b", shape=[2], data_offsets=[8, 10]), "1 bytes after its last tensor"),
        ({}, "11 bytes after its last tensor"),
    ],
)
def test_names_the_fault(tmp_path, fields, cause):
    file = stored(tmp_path / "m.safetensors", fields)
    with pytest.raises(InputError, match=re.escape(cause)) as error:
        read_header(file)
    assert str(file) in error.value.key


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "too few"),
        (b"\x02\0\0\0\0\0\0\0", "too few"),
        (struct.pack("<Q", 1 << 60) + b"{}", "no safetensors file"),
        (struct.pack("<Q", 3) + b"{}", "ends after the file"),
        (struct.pack("<Q", 2) + b"\xff\xfe", "not valid JSON"),
        (b"version https://git-lfs.github.com/spec/v1\n", "no safetensors file"),
    ],
)
def test_refuses_what_is_no_safetensors_file(tmp_path, content, cause):
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=cause):
        read_header(tmp_path / "m.safetensors")


def test_a_missing_file_is_the_users_error(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_header(tmp_path / "none.safetensors")


def test_truncation_at_every_byte_is_found(tmp_path):
    whole = save({"a": torch.arange(3.0), "b": torch.ones(2, dtype=torch.int8)})
    file = tmp_path / "m.safetensors"
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        with pytest.raises(InputError):
            read_header(file)


def test_every_dtype_of_the_library_is_known_by_its_name(tmp_path):
    for name, dtype in DTYPES.items():
        file = tmp_path / f"{name}.safetensors"
        save_file({"t": torch.zeros(4, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)}, file)
        info = read_header(file).tensors["t"]
        assert (info.dtype, info.shape) == (dtype, (4,))


@settings(max_examples=300, deadline=None)
@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_accepts_nothing_that_the_library_refuses(tmp_path_factory, place, bit):
    """With any one bit of the header flipped, what passes here also passes there, and reads the same."""
    whole = bytearray(save({"a": torch.arange(3.0), "b": torch.ones(2, 2, dtype=torch.int8)}, {"format": "pt"}))
    whole[place % (len(whole) - 16)] ^= 1 << bit
    file = tmp_path_factory.mktemp("flip") / "m.safetensors"
    file.write_bytes(whole)
    try:
        header = read_header(file)
    except InputError:
        return
    try:
        with safe_open(file, "pt") as theirs:
            assert set(theirs.keys()) == header.tensors.keys()
            for name, info in header.tensors.items():
                assert theirs.get_tensor(name).shape == info.shape
    except SafetensorError as error:
        pytest.fail(f"the library refuses it: {error}")
