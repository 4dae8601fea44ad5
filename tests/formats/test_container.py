"""A streamed safetensors file is, byte for byte, the one that the library writes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from compress_llm.formats.container import Spec, container_bytes, encode_header, split, write_container
from compress_llm.formats.headers import DTYPES, read_header
from compress_llm.formats.tensor_bytes import sha256_of


def filled(dtype, shape, seed=0):
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype).reshape(shape)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(lambda n: n != "__metadata__"),
        st.tuples(st.sampled_from(list(DTYPES.values())), st.lists(st.integers(0, 3), max_size=3)),
        min_size=1,
        max_size=8,
    )
)
def test_same_bytes_as_the_library(tmp_path_factory, specs):
    tensors = {name: filled(dtype, shape, seed) for seed, (name, (dtype, shape)) in enumerate(specs.items())}
    file = tmp_path_factory.mktemp("c") / "ours"
    hashes = write_container(file, tensors)
    assert file.read_bytes() == save(tensors, {"format": "pt"})
    assert hashes == {name: sha256_of(tensor) for name, tensor in tensors.items()}
    assert container_bytes({name: Spec(d, tuple(s)) for name, (d, s) in specs.items()}) == file.stat().st_size


def test_tensors_of_other_files_are_copied_as_they_are(tmp_path):
    tensors = {name: filled(dtype, (3, 5)) for name, dtype in DTYPES.items()}
    save_file(tensors, tmp_path / "source")
    stored = read_header(tmp_path / "source").tensors
    mixed = {name: stored[name] if number % 2 else tensors[name] for number, name in enumerate(tensors)}
    write_container(tmp_path / "copy", mixed)
    assert (tmp_path / "copy").read_bytes() == save(tensors, {"format": "pt"})
    assert encode_header(mixed) == read_header(tmp_path / "copy").raw
    assert load_file(tmp_path / "copy").keys() == tensors.keys()


@pytest.mark.parametrize(
    ("sizes", "shards"),
    [
        ([], []),
        ([4, 4], ["ab"]),
        ([4, 5], ["a", "b"]),
        ([9, 9, 1], ["a", "b", "c"]),
        ([1, 9, 1], ["a", "b", "c"]),
        ([3, 3, 3, 3], ["ab", "cd"]),
        ([8, 0, 0], ["abc"]),
    ],
)
def test_split_keeps_order_and_the_limit(sizes, shards):
    tensors = {name: Spec(torch.int8, (size,)) for name, size in zip("abcd", sizes, strict=False)}
    assert ["".join(names) for names in split(tensors, 8)] == shards
