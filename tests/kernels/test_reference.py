"""The reference decoder against compressed-tensors' own, bit for bit, and against the packings of `formats`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize, fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from compress_llm.formats.errors import InputError
from compress_llm.formats.grids import INT4, INT8
from compress_llm.formats.packings import packing
from compress_llm.formats.rounded import QParams, Rounded
from compress_llm.formats.scheme import SCHEMES, Activation, Scheme
from compress_llm.kernels.reference import REFERENCES, decode_rows, quantize_activation
from compress_llm.kernels.sparse_reference import SPARSE

TOKEN = Activation(INT8)
STATIC = Activation(INT8, granularity="tensor", dynamic=False)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# compressed-tensors 0.20.1 cannot unpack the zero points of eight rows or fewer; the property below covers those.
SHAPES = ((16, 128), (13, 40), (9, 8), (33, 24))


def random_rounded(scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Rounded:
    """Codes over the whole range, scales over many binades, any zero point."""
    generator = torch.Generator().manual_seed(seed)
    low, high = int(scheme.grid.lowest), int(scheme.grid.highest) + 1
    groups = (shape[0], scheme.groups(shape[1]))
    codes = torch.randint(low, high, shape, generator=generator).to(torch.int8)
    scale = torch.exp2(torch.randn(groups, generator=generator) * 4 - 6).to(dtype)
    zero = None if scheme.symmetric else torch.randint(low, high, groups, generator=generator).to(torch.int8)
    if zero is not None and scheme.zero_dtype == "float":
        zero = (zero + torch.rand(groups, generator=generator)).to(dtype)
    static = scheme.activation is not None and not scheme.activation.dynamic
    return Rounded(scheme, codes, QParams(scale, zero), torch.ones(1, dtype=dtype) if static else None)


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
def test_packed_words_decode_as_compressed_tensors_decodes_them(name, group, shape, dtype):
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
def test_plain_codes_decode_as_compressed_tensors_decodes_them(dtype):
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
def test_what_formats_packs_means_what_rounded_says(name, group, rows, spans, dtype, data):
    scheme = SCHEMES[name].with_group(group if SCHEMES[name].groupable else "channel")
    shape = (rows, spans * 4 if group == 4 else spans * 8)  # four at a time leave words half full
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


def test_what_cannot_be_decoded_is_an_input_error():
    scheme = SCHEMES["W4A16_ASYM"].with_group(8)
    tensors = packing(scheme).pack(random_rounded(scheme, (8, 16), torch.bfloat16))
    del tensors["weight_zero_point"]
    with pytest.raises(InputError, match="weight_zero_point"):
        decode_rows(tensors, scheme, (8, 16))
    with pytest.raises(InputError, match="pack-quantised.*pack-quantized"):
        decode_rows(tensors, replace(scheme, packing="pack-quantised"), (8, 16))


def activations(dtype: torch.dtype) -> Tensor:
    """[batch, tokens, features] with outliers, an all-zero token, denormals and halves of a step."""
    x = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(1)) * 3
    x[0, 0] = 0
    x[0, 1, 5] = 300
    x[0, 2] *= 1e-30
    x[1, 3] = torch.arange(48) - 24.5
    x[1, 3, 0] = 127.5
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dynamic_activations_are_those_of_compressed_tensors(dtype):
    x = activations(dtype)
    args = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
    expected = fake_quantize(x, *compute_dynamic_scales_and_zp(x, args, nn.Identity()), args)
    result = quantize_activation(x, TOKEN)
    assert result.dtype == dtype
    assert torch.equal(result, expected)
    assert not torch.equal(result, x)


def test_a_token_has_its_own_scale_whatever_the_rank():
    """compressed-tensors has one scale for all of a two-dimensional input; engines, which see rows, do not."""
    x = activations(torch.float32)
    assert torch.equal(quantize_activation(x.flatten(0, 1), TOKEN), quantize_activation(x, TOKEN).flatten(0, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_static_activations_are_those_of_compressed_tensors(dtype):
    x, scale = activations(dtype), torch.tensor([0.03125], dtype=dtype)
    args = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="tensor")
    expected = fake_quantize(x, scale, torch.zeros(1, dtype=torch.int8), args)
    result = quantize_activation(x, STATIC, scale)
    assert torch.equal(result, expected)
    assert result.abs().max() <= 128 * 0.03125


def test_the_input_is_left_as_it_was():
    x = activations(torch.float32)
    before = x.clone()
    quantize_activation(x, TOKEN)
    quantize_activation(x, STATIC, torch.ones(1))
    assert torch.equal(x, before)


def test_four_bit_activations_use_the_reach_of_their_grid():
    x = torch.tensor([[7.5, -7.5, 1.0, 0.4]])
    assert quantize_activation(x, Activation(INT4)).tolist() == [[7.0, -8.0, 1.0, 0.0]]


def test_a_static_activation_without_its_scale_is_refused():
    with pytest.raises(ValueError, match="input_scale"):
        quantize_activation(torch.ones(1, 4), STATIC)
