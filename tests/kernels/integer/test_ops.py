"""The operators: what fakes promise is what comes, and compiled code gives what eager code gives."""

from __future__ import annotations

import pytest
import torch

from compress_llm.formats.grids import INT8
from compress_llm.formats.scheme import Activation
from compress_llm.kernels.activations import activation_codes
from compress_llm.kernels.integer import ops


def test_operators_keep_their_promises(sample) -> None:
    weight = sample(72, 96, 4, 32, "int").arranged
    x = torch.randn(3, 96).half()
    given = (x, weight.codes, weight.scales, weight.zeros, torch.ones(72).half(), 4, 32, 72)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.compress_llm.linear, given, test_utils=checks)
    integer = sample(72, 96, 8, 0, integer=True).arranged
    codes, scale = ops.quantize_tokens(x, None)
    torch.library.opcheck(torch.ops.compress_llm.quantize_tokens, (x, None), test_utils=checks)
    given = (codes, scale, integer.codes, integer.scales, None, torch.float16)
    torch.library.opcheck(torch.ops.compress_llm.int8_linear, given, test_utils=checks)


@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize("static", [None, 0.05])
def test_any_number_of_dimensions(sample, error, integer, static) -> None:
    weight = sample(72, 96, 8 if integer else 4, 0 if integer else 32, integer=integer)
    x, scale = torch.randn(2, 3, 96).half(), None if static is None else torch.tensor([static]).half()
    y = ops.apply(x, weight.arranged, None, scale)
    assert y.shape == (2, 3, 72)
    seen = x.double()
    if integer:
        kind = Activation(INT8) if static is None else Activation(INT8, granularity="tensor", dynamic=False)
        codes, unit = activation_codes(x, kind, scale)
        seen = codes.double() * unit.double()
    assert error(y, seen @ weight.exact.T) < 1e-3


def test_compiled_without_a_break(sample) -> None:
    weight = sample(72, 96, 4, 32).arranged

    def twice(x):
        return ops.apply(x, weight, None) * 2

    x = torch.randn(3, 96).half()
    assert torch.equal(torch.compile(twice, backend="aot_eager", fullgraph=True)(x), twice(x))
