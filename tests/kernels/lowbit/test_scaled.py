"""Microscaled products as the hardware makes them, emulated, against the reference of the same packed linear."""

from __future__ import annotations

import pytest
import torch

from compress_llm.compress_cli.runs.bench_kernels import random_weight
from compress_llm.formats.scheme import SCHEMES, scheme
from compress_llm.kernels.lowbit import scaled
from compress_llm.kernels.lowbit.packed import microscaled
from compress_llm.kernels.matmul import matmul
from compress_llm.kernels.registry import Pick

CPU = torch.device("cpu")
NAMES = [name for name, row in SCHEMES.items() if microscaled(row)]


def test_which_schemes_have_such_products() -> None:
    assert NAMES == ["NVFP4", "MXFP4", "MXFP8"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, Triton does not interpret")
@pytest.mark.parametrize("name", NAMES)
def test_the_reference_agrees(name: str) -> None:
    row = scheme(name)
    tensors = random_weight(row, (72, 160), torch.bfloat16, CPU)
    x = torch.randn(2, 3, 160, generator=torch.Generator().manual_seed(0))
    expected = matmul(x, tensors, row, (72, 160), torch.ones(72))
    y = scaled.product(x, tensors, row.activation, torch.ones(72))
    assert y.shape == expected.shape
    assert (y - expected).norm() < 1e-5 * expected.norm()


def test_activations_without_scales_of_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="no scales of groups"):
        scaled.quantized(torch.ones(1, 32), scheme("FP8_DYNAMIC").activation, None)


def test_it_runs_where_it_is_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled, "pick_for", lambda *given: Pick("scaled", "asked for"))
    assert scaled.chosen(scheme("MXFP4"), (72, 160), 1, torch.bfloat16, torch.device("cuda"))
    assert not scaled.chosen(scheme("MXFP4"), (72, 160), 1, torch.bfloat16, CPU)
