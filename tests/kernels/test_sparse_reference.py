"""The sparse reference decoders against the packings of `formats`, for any rows, and by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from compress_llm.formats.errors import InputError
from compress_llm.formats.packings import packing
from compress_llm.formats.pruned import Pruned
from compress_llm.formats.rounded import QParams, Rounded
from compress_llm.formats.scheme import SCHEMES
from compress_llm.kernels.packed_linear import PackedLinear
from compress_llm.kernels.reference import decode_rows

from ..formats.sparse_weights import ADVERSARIAL, adversarial, any_weight, random_weight, same_bits

LAYOUTS = ("three-layer", "bitmap")


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(deadline=None, max_examples=40)
@given(weight=any_weight(), data=st.data())
def test_any_rows_are_those_of_the_weight(layout: str, weight: Tensor, data: st.DataObject) -> None:
    scheme = SCHEMES["SPARSE50"].with_layout(layout)
    start = data.draw(st.integers(0, weight.shape[0] - 1))
    stop = data.draw(st.integers(start + 1, weight.shape[0]))
    tensors = packing(scheme).pack(Pruned(scheme, weight))
    found = decode_rows(tensors, scheme, (weight.shape[0], weight.shape[1]), start, stop, weight.dtype)
    assert same_bits(found, weight[start:stop].contiguous())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_masks(layout: str, name: str) -> None:
    scheme, weight = SCHEMES["SPARSE50"].with_layout(layout), adversarial(name)
    tensors = packing(scheme).pack(Pruned(scheme, weight))
    assert same_bits(decode_rows(tensors, scheme, (130, 260), dtype=torch.bfloat16), weight)


def test_three_layers_by_hand() -> None:
    """Row 0: a full group, then an empty one whose slots hold the surplus. Row 1: three of a group, one left over."""
    tensors = {
        "weight_permutation": torch.tensor([1, 0, 2, 3, 4, 5, 6, 7], dtype=torch.int32),
        "weight_values": torch.tensor([[1.0, 2, 3, 4], [5, 6, 8, 9]]),
        "weight_positions": torch.tensor([[0x44], [0x48]], dtype=torch.uint8),
        "weight_steps": torch.tensor([0x13, 0x11], dtype=torch.uint8),
        "weight_step_offsets": torch.tensor([0, 2]),
        "weight_residual": torch.tensor([7.0]),
        "weight_residual_columns": torch.tensor([3], dtype=torch.int32),
        "weight_residual_offsets": torch.tensor([0, 0, 1]),
    }
    found = decode_rows(tensors, SCHEMES["SPARSE50"], (2, 8))
    assert found.tolist() == [[2, 1, 3, 4, 0, 0, 0, 0], [0, 5, 6, 7, 8, 9, 0, 0]]


@pytest.mark.parametrize("rows", [(0, 9), (3, 7), (8, 9)])
def test_sparse_codes(rows: tuple[int, int]) -> None:
    scheme = SCHEMES["SPARSE50_W4A16"].with_group(8)
    codes = torch.randint(-8, 8, (9, 24)).to(torch.int8).masked_fill(torch.rand(9, 24) < 0.4, 0)
    rounded = Rounded(scheme, codes, QParams(torch.rand(9, 3).to(torch.bfloat16) + 0.1))
    found = decode_rows(packing(scheme).pack(rounded), scheme, (9, 24), *rows)
    assert torch.equal(found, rounded.rows(*rows).dequantize())


def test_a_missing_tensor_is_named() -> None:
    scheme = SCHEMES["SPARSE50"]
    tensors = packing(scheme).pack(Pruned(scheme, random_weight((3, 8), 0.5)))
    del tensors["weight_steps"]
    with pytest.raises(InputError, match="weight_steps: is missing"):
        decode_rows(tensors, scheme, (3, 8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_packed_linear_computes_with_the_pruned_weight(layout: str) -> None:
    scheme = SCHEMES["SPARSE50"].with_layout(layout)
    weight = torch.randn(70, 40).to(torch.bfloat16).masked_fill(torch.rand(70, 40) < 0.5, 0.0)
    linear = PackedLinear(scheme, (70, 40), packing(scheme).pack(Pruned(scheme, weight)), torch.ones(70))
    plain = nn.Linear(40, 70)
    plain.weight.data, plain.bias.data = weight.float(), torch.ones(70)
    x = torch.randn(3, 40)
    assert torch.equal(linear(x), plain(x))
    assert "SPARSE50" in repr(linear)
