"""The reference decoder against compressed-tensors' own, bit for bit, and against the packings of `formats`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from compress_llm.formats.errors import InputError
from compress_llm.formats.packings import packing
from compress_llm.formats.scheme import SCHEMES, Scheme
from compress_llm.kernels.reference import REFERENCES, decode_rows
from compress_llm.kernels.sparse_reference import SPARSE

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# compressed-tensors 0.20.1 cannot unpack the zero points of eight rows or fewer; the property below covers those.
SHAPES = ((16, 128), (13, 40), (9, 8), (33, 24))


def arguments(scheme: Scheme) -> QuantizationArgs:
    return QuantizationArgs(
        num_bits=scheme.grid.bits,
        type="int",
        symmetric=scheme.symmetric,
        strategy=scheme.strategy,
        group_size=scheme.group_size,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("group", [8, "channel"])
@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM", "W8A16"])
def test_packed_words_decode_as_compressed_tensors_decodes_them(random_rounded, name, group, shape, dtype):
    scheme = SCHEMES[name].with_group(group)
    rounded = random_rounded(scheme, shape, dtype)
    tensors = {
        "weight_packed": pack_to_int32(rounded.codes, scheme.grid.bits),
        "weight_scale": rounded.params.scale,
        "weight_shape": torch.tensor(shape),
    }
    if rounded.params.zero is not None:
        tensors["weight_zero_point"] = pack_to_int32(rounded.params.zero, scheme.grid.bits, packed_dim=0)
    oracle = QuantizationScheme(targets=["Linear"], weights=arguments(scheme))
    expected = PackedQuantizationCompressor.decompress(tensors, oracle)["weight"]
    weight = decode_rows(tensors, scheme, shape, dtype=dtype)
    assert weight.dtype == dtype
    assert torch.equal(weight, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_codes_decode_as_compressed_tensors_decodes_them(random_rounded, dtype):
    scheme = SCHEMES["W8A8"]
    rounded = random_rounded(scheme, (13, 40), dtype)
    tensors = {"weight": rounded.codes, "weight_scale": rounded.params.scale}
    expected = dequantize(rounded.codes, rounded.params.scale, None, arguments(scheme))
    assert torch.equal(decode_rows(tensors, scheme, (13, 40), dtype=dtype), expected)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(name for name, scheme in SCHEMES.items() if scheme.rounds)),
    group=st.sampled_from([4, 8, "channel"]),
    rows=st.integers(1, 40),
    spans=st.integers(1, 6),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_what_formats_packs_means_what_rounded_says(random_rounded, name, group, rows, spans, dtype, data):
    scheme = SCHEMES[name].with_group(group) if SCHEMES[name].groupable else SCHEMES[name]
    fixed = None if scheme.groupable else scheme.group_size
    shape = (rows, spans * (fixed or (4 if group == 4 else 8)))  # four at a time leave words half full
    rounded = random_rounded(scheme, shape, dtype, data.draw(st.integers(0, 2**32)))
    tensors = packing(scheme).pack(rounded)
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    assert torch.equal(decode_rows(tensors, scheme, shape), rounded.dequantize())
    part = decode_rows(tensors, scheme, shape, start, stop, dtype)
    assert torch.equal(part, rounded.dequantize(dtype)[start:stop])


def test_every_packing_of_the_table_has_a_reference_that_needs_what_the_layout_has():
    for scheme in SCHEMES.values():
        for name in scheme.layouts or [None]:
            stored = scheme.with_layout(name)
            layout = packing(stored).layout(stored, 16, 128, torch.bfloat16)
            sparse = SPARSE.get(stored.packing)
            suffixes = sparse.suffixes if sparse else REFERENCES[stored.packing].suffixes(stored)
            assert set(suffixes) == layout.keys() - {"weight_shape"}


def test_what_cannot_be_decoded_is_an_input_error(random_rounded):
    scheme = SCHEMES["W4A16_ASYM"].with_group(8)
    tensors = packing(scheme).pack(random_rounded(scheme, (8, 16), torch.bfloat16))
    del tensors["weight_zero_point"]
    with pytest.raises(InputError, match="weight_zero_point"):
        decode_rows(tensors, scheme, (8, 16))
    with pytest.raises(InputError, match="pack-quantised.*pack-quantized"):
        decode_rows(tensors, replace(scheme, packing="pack-quantised"), (8, 16))
