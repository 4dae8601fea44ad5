"""Quantised activations with scales of groups, or shuffled, are those of the reference, code for code."""

from __future__ import annotations

import pytest
import torch

from compress_llm.formats.float_grids import E4M3
from compress_llm.formats.grids import INT8
from compress_llm.formats.scheme import Activation
from compress_llm.kernels.activations import activation_codes
from compress_llm.kernels.lowbit.narrow import natural
from compress_llm.kernels.lowbit.triton_quantize_blocks import quantize

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def tokens(dtype: torch.dtype) -> torch.Tensor:
    """On the CPU, whose quotients of float32 numbers are quotients: on a GPU, PyTorch multiplies by the inverse."""
    x = torch.randn(6, 384, generator=torch.Generator().manual_seed(0))
    x[1] *= 100
    x[2, :200] = 0
    x[3] = torch.linspace(-4, 4, 384)
    x[4] = torch.exp2(torch.linspace(-14, 3, 384))  # down to codes that are subnormal, and zero
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grid", [INT8, E4M3])
def test_a_scale_for_128_inputs(device, dtype, grid) -> None:
    x = tokens(dtype)
    codes, scale = (found.cpu() for found in quantize(x.to(device), 128, grid is E4M3))
    expected, scales = activation_codes(x, Activation(grid, "group", group_size=128))
    assert torch.equal(codes.to(dtype), expected.flatten(1))
    assert scale.shape == (3, 8)
    assert torch.equal(scale[:, :6], scales.float().squeeze(-1).T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grid", [INT8, E4M3])
def test_a_scale_a_token_in_the_order_of_4_bit_weights(device, dtype, grid) -> None:
    x = tokens(dtype)
    codes, scale = (found.cpu() for found in quantize(x.to(device), 0, grid is E4M3))
    expected, scales = activation_codes(x, Activation(grid))
    assert torch.equal(natural(codes).to(dtype), expected)
    assert torch.equal(scale, scales.float().view(-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_shows_in_the_scale(device, dtype, group, bad) -> None:
    x = tokens(dtype)
    x[0, 200] = bad
    kind = Activation(INT8, "group", group_size=group) if group else Activation(INT8)
    expected = activation_codes(x, kind)[1].float().flatten(1)
    scale = quantize(x.to(device), group, False)[1].cpu()
    found = scale[:, :6].T if group else scale.view(-1, 1)
    assert not torch.isfinite(expected[0]).all()
    assert torch.equal(found.nan_to_num(-1), expected.nan_to_num(-1))
