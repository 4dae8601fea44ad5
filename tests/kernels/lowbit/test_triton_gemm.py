"""The Triton product and decoder against float64: in the interpreter on a CPU, compiled where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from compress_llm.kernels.lowbit import triton_gemm
from compress_llm.kernels.lowbit.layout import dequantize

VARIANTS = [
    (4, 32, "int", torch.float16),
    (4, 64, "float", torch.bfloat16),
    (4, 0, None, torch.bfloat16),
    (8, 64, "int", torch.float16),
    (8, 0, None, torch.bfloat16),
]
# The interpreter's conversion to bfloat16 cuts digits off, where a GPU rounds.
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@pytest.mark.parametrize(("bits", "group", "zero", "dtype"), VARIANTS)
def test_product(sample, error, device, bits, group, zero, dtype) -> None:
    weight = sample(72, 192, bits, group, zero, dtype, device)
    x = torch.randn(3, 192, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    bias = torch.randn(72, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    exact = x.double().cpu() @ weight.exact.T + bias.double().cpu()
    assert error(triton_gemm.gemm(x, weight.arranged, bias), exact) < TOLERANCE[dtype]
    assert error(triton_gemm.gemm(x, weight.arranged, bias, splits=2), exact) < TOLERANCE[dtype]


@pytest.mark.parametrize(("bits", "group", "zero", "dtype"), VARIANTS[:2] + VARIANTS[3:4])
def test_decoder(sample, device, bits, group, zero, dtype) -> None:
    weight = sample(136, 192, bits, group, zero, dtype, device)
    got = triton_gemm.dequantize(weight.arranged, dtype)
    step = 2.0 ** (-10 if dtype == torch.float16 else -7)
    # A zero that is no integer may round the difference before the scale does.
    assert torch.allclose(got.float(), dequantize(weight.arranged), rtol=step, atol=8 * step if zero == "float" else 0)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "mxfp8", "fp8"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_floating_point_weights(float_sample, error, device, kind, dtype) -> None:
    weight = float_sample(kind, 72, 192, device)
    x = torch.randn(3, 192, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    exact = x.double().cpu() @ weight.exact.T
    assert error(triton_gemm.gemm(x, weight.arranged, None), exact) < TOLERANCE[dtype]
    assert error(triton_gemm.gemm(x, weight.arranged, None, splits=2), exact) < TOLERANCE[dtype]
    decoded = triton_gemm.dequantize(weight.arranged, dtype)
    assert torch.allclose(
        decoded.double().cpu(), weight.exact, rtol=2.0 ** (-10 if dtype == torch.float16 else -7), atol=1e-6
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="inline assembly needs a GPU")
@pytest.mark.parametrize(("bits", "group", "zero", "dtype"), VARIANTS)
@pytest.mark.parametrize("tokens", [1, 17, 100])
def test_assembly_and_its_plain_twin_agree(sample, error, device, bits, group, zero, dtype, tokens) -> None:
    weight = sample(1096, 1088, bits, group, zero, dtype, device)
    x = torch.randn(tokens, 1088, device=device, dtype=dtype)
    fast, plain = (triton_gemm.gemm(x, weight.arranged, None, ptx=ptx) for ptx in (True, False))
    assert torch.equal(fast, plain)
    assert error(fast, x.double().cpu() @ weight.exact.T) < TOLERANCE[dtype]
    decoded = (triton_gemm.dequantize(weight.arranged, dtype, ptx=ptx) for ptx in (True, False))
    assert torch.equal(*decoded)
