"""The product with a packed weight against a dense product with what it decodes to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from compress_llm.formats.packings import packing
from compress_llm.formats.rounded import Rounded
from compress_llm.formats.scheme import SCHEMES
from compress_llm.kernels import matmul as module
from compress_llm.kernels.activations import quantize_activation
from compress_llm.kernels.matmul import matmul

SHAPE = (21, 128)


@pytest.fixture
def weight(random_rounded):
    def make(name: str) -> tuple[Rounded, dict[str, Tensor]]:
        scheme = SCHEMES[name].with_group(8) if SCHEMES[name].groupable else SCHEMES[name]
        rounded = random_rounded(scheme, SHAPE, binades=(-4, 0))
        return rounded, packing(scheme).pack(rounded)

    return make


@pytest.mark.parametrize("at_once", [1 << 24, 5 * 128, 1], ids=["whole", "chunks", "rows"])
@pytest.mark.parametrize("name", sorted(name for name, row in SCHEMES.items() if row.rounds))
def test_product_is_the_dense_one(weight, name, at_once, monkeypatch):
    monkeypatch.setitem(module.DECODED_AT_ONCE, "cpu", at_once)
    rounded, tensors = weight(name)
    x, bias = torch.randn(2, 3, 128, dtype=torch.float64), torch.randn(21, dtype=torch.float64)
    seen = x
    if rounded.scheme.activation is not None:
        seen = quantize_activation(x, rounded.scheme.activation, rounded.input_scale)
        assert not torch.equal(seen, x)
    dense = rounded.dequantize().double()
    torch.testing.assert_close(matmul(x, tensors, rounded.scheme, SHAPE, bias), functional.linear(seen, dense, bias))
    torch.testing.assert_close(matmul(x, tensors, rounded.scheme, SHAPE), functional.linear(seen, dense))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_computes_in_the_dtype_of_its_input(weight, dtype):
    rounded, tensors = weight("W4A16_ASYM")
    x = torch.randn(4, 128).to(dtype)
    result = matmul(x, tensors, rounded.scheme, SHAPE)
    assert result.dtype == dtype
    assert torch.equal(result, functional.linear(x, rounded.dequantize(dtype)))
