"""PackedLinear as a module: a drop-in for nn.Linear that holds packed tensors and nothing dense."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compress_llm.formats.packings import packing
from compress_llm.formats.rounded import QParams, Rounded
from compress_llm.formats.scheme import SCHEMES
from compress_llm.kernels.packed_linear import PackedLinear

SHAPE = (21, 32)


@pytest.fixture
def rounded() -> Rounded:
    torch.manual_seed(4)
    scheme = SCHEMES["W4A16_ASYM"].with_group(8)
    codes = torch.randint(-8, 8, SHAPE, dtype=torch.int8)
    zero = torch.randint(-8, 8, (21, 4), dtype=torch.int8)
    # A scale that float16 cannot hold: a round trip through another dtype would show.
    scale = (torch.rand(21, 4) + 0.1).to(torch.bfloat16)
    scale[3, 1] = 1e-10
    return Rounded(scheme, codes, QParams(scale, zero))


@pytest.fixture
def linear(rounded) -> PackedLinear:
    return PackedLinear(rounded.scheme, SHAPE, packing(rounded.scheme).pack(rounded), torch.randn(21))


def test_forward_is_that_of_the_decoded_linear(linear, rounded):
    x = torch.randn(2, 5, 32)
    expected = nn.functional.linear(x, rounded.dequantize(), linear.bias)
    assert torch.equal(linear(x), expected)


def test_it_holds_the_packed_tensors_and_the_bias_only(linear, rounded):
    tensors = packing(rounded.scheme).pack(rounded)
    state = linear.state_dict()
    assert state.keys() == {*tensors, "bias"}
    assert all(torch.equal(state[suffix], tensors[suffix]) for suffix in tensors)
    assert linear.tensors.keys() == tensors.keys()
    assert [name for name, _ in linear.named_parameters()] == ["bias"]


def test_rows_are_slices_of_the_weight(linear, rounded):
    weight = rounded.dequantize()
    assert torch.equal(linear.weight_rows(), weight)
    assert torch.equal(linear.weight_rows(5, 18), weight[5:18])
    assert torch.equal(linear.weight_rows(20), weight[20:])
    assert torch.equal(linear.weight_rows(20, dtype=torch.bfloat16), weight[20:].bfloat16())


@pytest.mark.parametrize("change", [nn.Module.half, nn.Module.float, nn.Module.double, lambda m: m.to(torch.float16)])
def test_dtypes_of_packed_tensors_never_change(linear, rounded, change):
    dtypes = {name: tensor.dtype for name, tensor in linear.tensors.items()}
    change(linear)
    assert {name: tensor.dtype for name, tensor in linear.tensors.items()} == dtypes
    assert torch.equal(linear.weight_rows(), rounded.dequantize())
    assert linear(torch.ones(1, 32, dtype=linear.bias.dtype)).dtype == linear.bias.dtype


def test_packed_tensors_follow_to_another_device(linear):
    linear.to("meta", torch.float16)
    assert all(tensor.is_meta for tensor in linear.tensors.values())
    assert linear.bias.is_meta


def test_gradients_flow_to_the_input(linear, rounded):
    x = torch.randn(3, 32, requires_grad=True)
    linear(x).sum().backward()
    torch.testing.assert_close(x.grad, rounded.dequantize().sum(0).expand(3, -1))


def test_it_says_what_it_is(linear):
    assert (linear.in_features, linear.out_features) == (32, 21)
    said = repr(linear)
    assert said == "PackedLinear(in_features=32, out_features=21, bias=True, scheme=W4A16_ASYM, group_size=8)"
    channel = PackedLinear(SCHEMES["W8A8"], SHAPE, {})
    assert "bias=False, scheme=W8A8, one scale a channel" in repr(channel)
