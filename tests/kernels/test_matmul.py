"""The product with a packed weight against a dense product with what it decodes to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from compress_llm.formats.packings import packing
from compress_llm.formats.rounded import QParams, Rounded
from compress_llm.formats.scheme import SCHEMES
from compress_llm.kernels import matmul as module
from compress_llm.kernels.matmul import matmul
from compress_llm.kernels.reference import quantize_activation

SHAPE = (21, 32)


def weight(name: str) -> tuple[Rounded, dict[str, Tensor]]:
    torch.manual_seed(2)
    scheme = SCHEMES[name].with_group(8) if SCHEMES[name].groupable else SCHEMES[name]
    low, high = int(scheme.grid.lowest), int(scheme.grid.highest) + 1
    groups = (SHAPE[0], scheme.groups(SHAPE[1]))
    zero = None if scheme.symmetric else torch.randint(low, high, groups, dtype=torch.int8)
    if zero is not None and scheme.zero_dtype == "float":
        zero = (zero + torch.rand(groups)).to(torch.bfloat16)
    static = scheme.activation is not None and not scheme.activation.dynamic
    rounded = Rounded(
        scheme,
        torch.randint(low, high, SHAPE, dtype=torch.int8),
        QParams((torch.rand(groups) + 0.1).to(torch.bfloat16), zero),
        torch.tensor([0.02], dtype=torch.bfloat16) if static else None,
    )
    return rounded, packing(scheme).pack(rounded)


@pytest.mark.parametrize("at_once", [1 << 24, 5 * 32, 1], ids=["whole", "chunks", "rows"])
@pytest.mark.parametrize("name", sorted(name for name, row in SCHEMES.items() if row.rounds))
def test_product_is_the_dense_one(name, at_once, monkeypatch):
    monkeypatch.setitem(module.DECODED_AT_ONCE, "cpu", at_once)
    rounded, tensors = weight(name)
    x, bias = torch.randn(2, 3, 32, dtype=torch.float64), torch.randn(21, dtype=torch.float64)
    seen = x
    if rounded.scheme.activation is not None:
        seen = quantize_activation(x, rounded.scheme.activation, rounded.input_scale)
        assert not torch.equal(seen, x)
    dense = rounded.dequantize().double()
    torch.testing.assert_close(matmul(x, tensors, rounded.scheme, SHAPE, bias), functional.linear(seen, dense, bias))
    torch.testing.assert_close(matmul(x, tensors, rounded.scheme, SHAPE), functional.linear(seen, dense))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_computes_in_the_dtype_of_its_input(dtype):
    rounded, tensors = weight("W4A16_ASYM")
    x = torch.randn(4, 32).to(dtype)
    result = matmul(x, tensors, rounded.scheme, SHAPE)
    assert result.dtype == dtype
    assert torch.equal(result, functional.linear(x, rounded.dequantize(dtype)))
