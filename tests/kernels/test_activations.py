"""Inputs as engines see them: the arithmetic of compressed-tensors, bit for bit."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from torch import Tensor, nn

from compress_llm.formats.grids import INT4, INT8
from compress_llm.formats.scheme import SCHEMES, Activation
from compress_llm.kernels.activations import quantize_activation

TOKEN = Activation(INT8)
STATIC = Activation(INT8, granularity="tensor", dynamic=False)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PRESETS = ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "MXFP4", "MXFP8", "W4A8", "W4AFP8", "W8A8")


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


def published(x: Tensor, name: str, given: Tensor | None) -> Tensor:
    """Inputs under a preset by compressed-tensors' own arithmetic; a static scale, or a global one, is `given`."""
    args = preset_name_to_scheme(name, ["Linear"]).input_activations
    if args.dynamic is False:
        return fake_quantize(x, given, None, args)
    return fake_quantize(x, *compute_dynamic_scales_and_zp(x, args, nn.Identity(), given), args, global_scale=given)


def inputs(dtype: torch.dtype) -> Tensor:
    """[batch, tokens, features] with outliers, zeros and halves of a step; nothing near the least of any dtype."""
    x = torch.randn(2, 7, 256, generator=torch.Generator().manual_seed(1)) * 3
    x[0, 0] = 0
    x[0, 1, 5] = 300
    x[0, 2, :128] *= 1e-3
    x[1, 3, :14] = torch.arange(14) / 2 - 3
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PRESETS)
def test_inputs_of_every_preset_are_those_of_compressed_tensors(name, dtype):
    x, activation = inputs(dtype), SCHEMES[name].activation
    assert activation is not None
    given = {"FP8": torch.tensor([0.03125], dtype=dtype), "NVFP4": torch.tensor([2.0])}.get(name)
    before = x.clone()
    result = quantize_activation(x, activation, given)
    assert (result.dtype, result.shape) == (dtype, x.shape)
    assert torch.equal(x, before) and not torch.equal(result, x)
    assert torch.equal(result, published(x, name, given).to(dtype))


def test_int8_groups_are_rows_of_their_own():
    activation = SCHEMES["W8A8_BLOCK"].activation
    x = inputs(torch.float32)
    expected = quantize_activation(x.reshape(2, 14, 128), TOKEN).reshape(x.shape)
    assert torch.equal(quantize_activation(x, activation), expected)


def test_groups_that_do_not_divide_the_features_are_refused():
    with pytest.raises(ValueError, match="groups of 32 do not divide 40 features"):
        quantize_activation(torch.ones(1, 40), SCHEMES["MXFP4"].activation)


def test_a_missing_global_scale_is_named():
    with pytest.raises(ValueError, match="input_global_scale"):
        quantize_activation(torch.ones(1, 16), SCHEMES["NVFP4"].activation)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_saturate_where_the_global_scale_leaves_no_room(dtype):
    x = torch.full((1, 16), 100.0, dtype=dtype)
    clipped = quantize_activation(x, SCHEMES["NVFP4"].activation, torch.tensor([448 * 6 / 50.0]))
    assert torch.allclose(clipped.float(), torch.tensor(50.0), rtol=0.01)


@pytest.mark.parametrize("name", ["MXFP4", "MXFP8", "NVFP4", "W8A8", "FP8_BLOCK"])
def test_nan_is_not_hidden(name: str) -> None:
    x, given = torch.ones(2, 256), None
    x[1, 200] = torch.nan
    activation = SCHEMES[name].activation
    if activation.global_scale:
        given = torch.tensor([64.0])
    seen = quantize_activation(x, activation, given)
    assert seen[0].isfinite().all()
    assert seen[1].isnan().sum() == (activation.group_size or 256)


def error(x: Tensor, scale: Tensor) -> Tensor:
    """Squared, of E2M1 codes under scales [groups, candidates] of `x` [groups, size]."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    units = x.abs()[:, None] / scale[..., None]
    nearest = (units[..., None] - grid).abs().amin(-1)
    return ((nearest * scale[..., None]) ** 2).sum(-1)


@pytest.mark.parametrize(("rule", "first", "others"), [("max", 6, 4), ("four-over-six", 6, 4.5), ("mse", 6.5, 4.875)])
def test_rules_choose_what_loses_less(rule: str, first: float, others: float) -> None:
    activation = SCHEMES["NVFP4"].with_input_rule(rule).activation
    x = torch.full((1, 16), 5.0)
    x[0, 0] = 6
    expected = torch.full((1, 16), float(others))
    expected[0, 0] = first
    assert torch.equal(quantize_activation(x, activation, torch.ones(1)), expected)


def test_the_best_of_all_scales_is_found() -> None:
    """But for groups that would lose little less by codes further away."""
    x = torch.randn(4000, 16, generator=torch.Generator().manual_seed(0))
    given = torch.tensor([40.0])
    codes = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float() / given
    least = torch.cat([error(part, codes.expand(len(part), -1)).amin(1) for part in x.split(500)])
    lost = {
        rule: (quantize_activation(x, SCHEMES["NVFP4"].with_input_rule(rule).activation, given) - x).square().sum(1)
        for rule in ("max", "four-over-six", "mse")
    }
    assert (lost["mse"] <= lost["max"]).all() and (lost["four-over-six"] <= lost["max"]).all()
    assert (lost["mse"] > lost["four-over-six"]).float().mean() < 0.05
    assert lost["mse"].sum() <= 1.01 * least.sum()
    assert lost["mse"].sum() <= 0.85 * lost["max"].sum()
