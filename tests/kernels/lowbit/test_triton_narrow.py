"""The Triton products of 8-bit activations: of integers sums are exact, so only the last rounding may differ."""

from __future__ import annotations

import pytest
import torch

from compress_llm.kernels.lowbit import ops, triton_narrow
from compress_llm.kernels.lowbit.narrow import values


@pytest.mark.parametrize(("rows", "columns", "tokens"), [(72, 144, 3), (136, 272, 18)])
def test_product(sample, error, device, rows, columns, tokens) -> None:
    weight = sample(rows, columns, 8, 0, device=device, narrow=True)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-128, 128, (tokens, columns), dtype=torch.int8, generator=generator)
    scale = torch.rand(tokens, generator=generator) + 0.5
    bias = torch.randn(rows, generator=generator).half()
    y = triton_narrow.gemm(x.to(device), scale.to(device), weight.arranged, bias.to(device), torch.float16)
    exact = (x.double() @ weight.codes.double().T) * scale.double()[:, None] * weight.scale.double().T + bias.double()
    assert error(y, exact) < 3e-4


def test_product_of_floating_point_numbers(float_sample, error, device) -> None:
    weight = float_sample("narrow", 136, 272, device)
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(18, 272, generator=generator) * 100).to(torch.float8_e4m3fn)
    scale = torch.rand(18, generator=generator) + 0.5
    y = triton_narrow.gemm(x.to(device), scale.to(device), weight.arranged, None, torch.float16)
    assert error(y, x.double() @ weight.exact.T * scale.double()[:, None]) < 3e-4


@pytest.mark.parametrize("floating", [False, True])
@pytest.mark.parametrize(("rows", "columns", "tokens"), [(72, 128, 3), (136, 384, 18)])
def test_product_of_scaled_blocks(block_sample, error, device, floating, rows, columns, tokens) -> None:
    weight = block_sample(rows, columns, floating, device)
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(0)).half().to(device)
    x[:, 5] *= 50
    codes, scale = ops.quantize_blocks(x, 128, floating)
    bias = torch.randn(rows, generator=torch.Generator().manual_seed(1)).half().to(device)
    y = triton_narrow.gemm(codes, scale, weight.arranged, bias, torch.float16)
    assert (
        error(y, values(codes, scale, 8).cpu() @ weight.exact.T + bias.double().cpu()) < 1e-3
    )  # Hopper's sums of E4M3
