"""The operator's promises, and that shapes pass through."""

from __future__ import annotations

import torch

from compress_llm.kernels.sparse import ops


def test_operator_keeps_its_promises(sample) -> None:
    weight = sample(72, 96).arranged
    x, bias = torch.randn(3, 96).bfloat16(), torch.ones(72).bfloat16()
    tensors = (weight.masks, weight.values, weight.starts, weight.table)
    given = (x, *tensors, bias, weight.cut.numbers(), weight.head, 72)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.compress_llm.sparse_linear, given, test_utils=checks)


def test_operator_of_three_layers_keeps_its_promises(sample) -> None:
    weight = sample(72, 96).layers()
    x, bias = torch.randn(3, 96).bfloat16(), torch.ones(72).bfloat16()
    given = (x, weight.tiles, weight.starts, weight.rest, bias, weight.cut.numbers(), 72)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.compress_llm.three_layer_linear, given, test_utils=checks)


def test_any_number_of_dimensions(sample, error) -> None:
    weight = sample(72, 96)
    x = torch.randn(2, 3, 96).bfloat16()
    for arranged in (weight.arranged, weight.layers()):
        y = ops.apply(x, arranged, None)
        assert y.shape == (2, 3, 72)
        assert error(y, weight.exact(x)) < 5e-3


def test_compiled_without_a_break(sample) -> None:
    weight = sample(72, 96).arranged

    def twice(x):
        return ops.apply(x, weight, None) * 2

    x = torch.randn(3, 96).bfloat16()
    assert torch.equal(torch.compile(twice, backend="aot_eager", fullgraph=True)(x), twice(x))
