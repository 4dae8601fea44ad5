"""Activations rounded in one kernel are those of the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from compress_llm.formats.scheme import SCHEMES
from compress_llm.kernels.activations import quantize_activation
from compress_llm.kernels.lowbit.triton_round import quantize

DTYPES = (torch.float16, torch.bfloat16)
NAMES = ("NVFP4", "MXFP4", "MXFP8", "W4A8", "W4AFP8", "W8A8_BLOCK", "FP8_BLOCK")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_agrees(device, name: str, dtype: torch.dtype) -> None:
    activation = SCHEMES[name].activation
    x = torch.randn(6, 384, generator=torch.Generator().manual_seed(0))
    x[1] *= 1000
    x[2] = 0
    x[3] = torch.linspace(-7, 7, 384)  # every half between two codes
    x[4] = torch.exp2(torch.linspace(-14, 3, 384))
    x[5, 32:] = 0
    x, given = x.to(device, dtype), None
    if activation.global_scale:
        given = torch.tensor([64.0], device=device)
    kind = (activation.grid.name, activation.group_size or 0, activation.scale_grid is not None)
    assert torch.equal(quantize(x, *kind, given), quantize_activation(x, activation, given))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_takes_its_group_with_it(device, name: str, dtype: torch.dtype) -> None:
    activation = SCHEMES[name].activation
    x = torch.randn(2, 384, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    x[1, 200] = torch.nan
    given = torch.tensor([64.0], device=device) if activation.global_scale else None
    kind = (activation.grid.name, activation.group_size or 0, activation.scale_grid is not None)
    lost = quantize(x, *kind, given).isnan()
    assert torch.equal(lost, quantize_activation(x, activation, given).isnan())
    assert lost.sum() == (activation.group_size or 384)


@pytest.mark.parametrize("rule", ["four-over-six", "mse"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rules_choose_as_the_reference_does(device, rule: str, dtype: torch.dtype) -> None:
    activation = SCHEMES["NVFP4"].with_input_rule(rule).activation
    x = torch.randn(6, 384, generator=torch.Generator().manual_seed(0))
    x[1] *= 1000
    x[2] = 0
    x[3, 32:] = 0
    x[4] *= 2.0**-14
    x, given, kind = x.to(device, dtype), torch.tensor([64.0], device=device), (activation.grid.name, 16, True)
    found, expected = quantize(x, *kind, given, rule), quantize_activation(x, activation, given)
    differ = (found != expected).view(-1, 16).any(1)
    assert differ.float().mean() < 0.02  # of two scales that are as good, either
    lost = [(y.double() - x.double()).view(-1, 16).square().sum(1) for y in (found, expected)]
    assert torch.allclose(*lost, rtol=1e-2 if dtype == torch.bfloat16 else 1e-3)
    assert not torch.equal(found, quantize(x, *kind, given))
