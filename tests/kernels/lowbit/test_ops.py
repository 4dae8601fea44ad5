"""The operators: what fakes promise is what comes, and compiled code gives what eager code gives."""

from __future__ import annotations

import pytest
import torch

from compress_llm.formats.float_grids import E2M1, E4M3, E8M0
from compress_llm.formats.grids import INT8
from compress_llm.formats.scheme import Activation
from compress_llm.kernels.activations import activation_codes, quantize_activation
from compress_llm.kernels.lowbit import ops, product, triton_quantize_blocks
from compress_llm.kernels.lowbit.configs import NARROW_TOKENS
from compress_llm.kernels.registry import Pick, Problem


def test_operators_keep_their_promises(sample) -> None:
    weight = sample(72, 96, 4, 32, "int").arranged
    x = torch.randn(3, 96).half()
    given = (x, *weight.tensors, torch.ones(72).half(), 4, 32, 72, False)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.compress_llm.linear, given, test_utils=checks)
    narrow = sample(72, 96, 8, 0, narrow=True).arranged
    codes, scale = ops.quantize_tokens(x, None, False)
    torch.library.opcheck(torch.ops.compress_llm.quantize_tokens, (x, None, False), test_utils=checks)
    given = (codes, scale, narrow.codes, None, narrow.factors, None, 72, torch.float16)
    torch.library.opcheck(torch.ops.compress_llm.narrow_linear, given, test_utils=checks)


def test_tokens_are_quantised_by_what_multiplies_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Problem] = []
    made = torch.ones(2, 96, dtype=torch.int8), torch.ones(2)
    monkeypatch.setattr(ops, "pick", lambda problem: asked.append(problem) or Pick("cuda", ""))
    monkeypatch.setattr(ops, "cuda_quantize", lambda x, input_scale, floating: made)
    assert ops.quantize_tokens(torch.randn(2, 96).half(), None, False)[0].count_nonzero() == made[0].numel()
    (problem,) = asked
    assert (problem.tokens, problem.in_features, problem.dtype, problem.narrow) == (2, 96, torch.float16, True)
    monkeypatch.setattr(ops, "pick", lambda problem: Pick("reference", ""))
    assert ops.quantize_tokens(torch.zeros(2, 96).half(), None, False)[0].count_nonzero() == 0


def test_blocks_are_quantised_by_what_multiplies_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.ones(2, 128, dtype=torch.int8), torch.ones(1, 4)
    monkeypatch.setattr(triton_quantize_blocks, "quantize", lambda *given: made)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: (9, 0))
    for name, expected in (("cuda", 256), ("triton", 256), ("reference", 0)):
        monkeypatch.setattr(ops, "pick", lambda problem, name=name: Pick(name, ""))
        assert ops.quantize_blocks(torch.zeros(2, 128).half(), 128, False)[0].count_nonzero() == expected


@pytest.mark.parametrize("floating", [False, True])
def test_no_tokens_have_no_codes(block_sample, floating) -> None:
    x = torch.zeros(0, 256).half()
    assert [part.shape for part in ops.quantize_blocks(x, 128, floating)] == [(0, 256), (2, 0)]
    assert [part.shape for part in ops.quantize_blocks(x, 0, floating)] == [(0, 256), (0,)]
    assert [part.shape for part in ops.quantize_tokens(x, None, floating)] == [(0, 256), (0,)]
    assert ops.apply(x.view(3, 0, 256), block_sample(136, 256, floating).arranged, None).shape == (3, 0, 136)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("static", [None, 0.05])
def test_any_number_of_dimensions(sample, error, narrow, static) -> None:
    weight = sample(72, 96, 8 if narrow else 4, 0 if narrow else 32, narrow=narrow)
    x, scale = torch.randn(2, 3, 96).half(), None if static is None else torch.tensor([static]).half()
    y = ops.apply(x, weight.arranged, None, None, scale)
    assert y.shape == (2, 3, 72)
    seen = x.double()
    if narrow:
        kind = Activation(INT8) if static is None else Activation(INT8, granularity="tensor", dynamic=False)
        codes, unit = activation_codes(x, kind, scale)
        seen = codes.double() * unit.double()
    assert error(y, seen @ weight.exact.T) < 1e-3


def test_floating_point_operators_keep_their_promises(float_sample, device) -> None:
    weight, narrow = float_sample("nvfp4", 72, 128).arranged, float_sample("narrow", 72, 128).arranged
    x, checks = torch.randn(3, 128).half(), ("test_schema", "test_faketensor")
    given = (x, *weight.tensors, None, 4, 16, 72, True)
    torch.library.opcheck(torch.ops.compress_llm.linear, given, test_utils=checks)
    torch.library.opcheck(torch.ops.compress_llm.quantize_tokens, (x, None, True), test_utils=checks[1:])
    for kind in ((None, "e2m1", 32, True, "max"), (torch.ones(1, device=device), "e2m1", 16, True, "mse")):
        torch.library.opcheck(torch.ops.compress_llm.round_inputs, (x.to(device), *kind), test_utils=checks)
    given = (*ops.quantize_tokens(x, None, True), narrow.codes, None, narrow.factors, None, 72, torch.float16)
    torch.library.opcheck(
        torch.ops.compress_llm.narrow_linear, given, test_utils=checks[1:]
    )  # compares no 8-bit floats


@pytest.mark.parametrize("activation", [None, Activation(E2M1, "group", group_size=32, scale_grid=E8M0)])
def test_inputs_of_16_bits_are_rounded_first(float_sample, error, activation) -> None:
    weight, x = float_sample("mxfp4", 72, 128), torch.randn(5, 128).half()
    seen = x if activation is None else quantize_activation(x, activation)
    assert error(ops.apply(x, weight.arranged, None, activation), seen.double() @ weight.exact.T) < 1e-3


@pytest.mark.parametrize("floating", [False, True])
def test_scaled_blocks(block_sample, error, floating) -> None:
    weight, x = block_sample(136, 256, floating), torch.randn(3, 5, 256).half()
    checks = ("test_faketensor",) if floating else ("test_schema", "test_faketensor")
    for group in (0, 128):
        torch.library.opcheck(ops.quantize_blocks, (x.view(15, 256), group, floating), test_utils=checks)
    codes, scale = ops.quantize_blocks(x.view(15, 256), 128, floating)
    given = (codes, scale, weight.arranged.codes, weight.arranged.scales, None, None, 136, torch.float16)
    torch.library.opcheck(torch.ops.compress_llm.narrow_linear, given, test_utils=checks)
    codes, unit = activation_codes(x, Activation(E4M3 if floating else INT8, "group", group_size=128))
    seen = (codes.double() * unit.double()).view(x.shape)
    assert error(ops.apply(x, weight.arranged, None), seen @ weight.exact.T) < 1e-3


@pytest.mark.parametrize("grid", [INT8, E4M3])
@pytest.mark.parametrize("tokens", [NARROW_TOKENS - 1, NARROW_TOKENS])
def test_many_tokens_are_multiplied_as_8_bit_numbers(sample, error, grid, tokens, monkeypatch) -> None:
    seen: list[bool] = []

    def picked(weight, *given) -> Pick:  # as if a GPU were here, which computes nothing
        seen.append(weight.narrow)
        return Pick("cuda" if tokens == NARROW_TOKENS and len(seen) == 1 else "reference", "")

    weight, x = sample(72, 256, 4, 128), torch.randn(tokens, 256).half()
    given = (x, weight.arranged.codes, weight.arranged.scales, None, 72, grid is E4M3)
    torch.library.opcheck(torch.ops.compress_llm.mixed_linear, given, test_utils=("test_schema", "test_faketensor"))
    monkeypatch.setattr(product, "picked", picked)
    y = ops.apply(x, weight.arranged, None, Activation(grid))
    assert seen[-1] == (tokens == NARROW_TOKENS)
    codes, unit = activation_codes(x, Activation(grid))
    assert error(y, (codes.double() * unit.double()) @ weight.exact.T) < 1e-3


@pytest.mark.parametrize("activation", [None, Activation(E4M3)])
def test_compiled_without_a_break(sample, activation) -> None:
    weight = sample(72, 128, 4, 128).arranged

    def twice(x):
        return ops.apply(x, weight, None, activation) * 2

    x = torch.randn(3, 128).half()
    assert torch.equal(torch.compile(twice, backend="aot_eager", fullgraph=True)(x), twice(x))
