"""Quantised activations are those of the reference, code for code and scale for scale."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import rms_norm

from compress_llm.formats.float_grids import E4M3
from compress_llm.formats.grids import INT8
from compress_llm.formats.scheme import Activation
from compress_llm.kernels.activations import activation_codes
from compress_llm.kernels.lowbit.triton_quantize import quantize


def tokens(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    x = torch.randn(5, 200, generator=torch.Generator().manual_seed(0))
    x[1] *= 100
    x[2] = 0
    x[3] = torch.linspace(-4, 4, 200)
    return x.to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_scale_a_token(device, dtype) -> None:
    x = tokens(dtype, device)
    codes, scale = quantize(x)
    expected, scales = activation_codes(x, Activation(INT8))
    assert torch.equal(scale, scales.float().view(-1))
    assert torch.equal(codes.to(dtype), expected)


def test_a_scale_for_all(device) -> None:
    x, given = tokens(torch.bfloat16, device), torch.tensor([0.037], dtype=torch.bfloat16, device=device)
    codes, scale = quantize(x, input_scale=given)
    kind = Activation(INT8, granularity="tensor", dynamic=False)
    assert torch.equal(codes.to(torch.bfloat16), activation_codes(x, kind, given)[0])
    assert torch.equal(scale, given.float().expand(5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("given", [None, 0.037])
def test_floating_point_codes(device, dtype, given) -> None:
    x = tokens(dtype, device)
    x[4] = torch.exp2(torch.linspace(-14, 3, 200)).to(dtype)  # down to codes that are subnormal, and zero
    unit = None if given is None else torch.tensor([given], dtype=dtype, device=device)
    codes, scale = quantize(x, input_scale=unit, floating=True)
    kind = Activation(E4M3) if given is None else Activation(E4M3, granularity="tensor", dynamic=False)
    expected, scales = activation_codes(x, kind, unit)
    assert torch.equal(scale, scales.float().view(-1).expand(5))
    assert torch.equal(codes.to(dtype), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_shows_in_the_scale(device, dtype, bad) -> None:
    x = tokens(dtype, device)
    x[0, 7] = bad
    expected = activation_codes(x, Activation(INT8))[1].float().view(-1)
    assert torch.equal(quantize(x)[1].nan_to_num(-1), expected.nan_to_num(-1))


def test_the_norm_before_it(device) -> None:
    x = tokens(torch.float32, device)
    weight = torch.rand(200, generator=torch.Generator().manual_seed(1)).to(device)
    codes, scale = quantize(x, weight, 1e-6)
    normal = rms_norm(x, (200,), weight, 1e-6)
    expected, scales = activation_codes(normal, Activation(INT8))
    assert torch.allclose(scale, scales.view(-1), rtol=1e-6)
    assert (codes.float() - expected).abs().max() <= 1
    assert (codes.float() != expected).float().mean() < 0.01
