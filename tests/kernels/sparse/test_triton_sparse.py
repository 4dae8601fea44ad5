"""The Triton product and decoder against float64: in the interpreter on a CPU, compiled where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from compress_llm.kernels.sparse import triton_sparse

CUTS = [None, (2, 3, 3, 2, 1), (1, 6, 5, 5, 1)]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_product(sample, error, device, cut, dtype) -> None:
    weight = sample(72, 328, dtype=dtype, device=device, cut=cut)
    x = torch.randn(3, 328, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    bias = torch.randn(72, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    exact = weight.exact(x) + bias.double().cpu()
    assert error(triton_sparse.product(x, weight.arranged, bias), exact) < (2e-3 if dtype == torch.float16 else 1e-2)


def test_several_tiles_of_tokens(sample, error, device) -> None:
    weight = sample(72, 136, dtype=torch.float16, device=device, cut=(1, 3, 5, 5, 1))
    x = torch.randn(33, 136, generator=torch.Generator().manual_seed(0)).to(device, torch.float16)
    assert error(triton_sparse.product(x, weight.arranged, None), weight.exact(x)) < 2e-3


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", ["even", "rows"])
def test_decoder(sample, device, cut, kind) -> None:
    weight = sample(72, 328, 0.5, kind, device=device, cut=cut)
    assert torch.equal(triton_sparse.unpack(weight.arranged).cpu(), weight.weight)


def test_many_tokens_expand_the_weight_once(sample, error, device) -> None:
    weight = sample(40, 136, dtype=torch.float16, device=device)
    x = torch.randn(triton_sparse.MOST_TOKENS + 1, 136, device=device).half()
    assert error(triton_sparse.product(x, weight.arranged, None), weight.exact(x)) < 2e-3
