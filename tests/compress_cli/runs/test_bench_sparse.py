"""Random sparse weights and their cells."""

from __future__ import annotations

import pytest
import torch

from compress_llm.compress_cli.runs import bench_sparse
from compress_llm.compress_cli.runs.bench_kernels import bench_kernels, cell
from compress_llm.compress_cli.runs.timing import Limits
from compress_llm.formats.errors import InputError
from compress_llm.formats.progress import silent
from compress_llm.formats.scheme import scheme
from compress_llm.kernels.sparse import three_layer

CPU = torch.device("cpu")


@pytest.mark.parametrize("mask", ["iid", "wanda"])
def test_a_cell_of_a_sparse_weight(mask) -> None:
    weights = bench_sparse.SparseWeights((96, 128), CPU, torch.bfloat16, mask)
    row = cell(weights, 2, Limits(1e12, 1e15))
    assert (row.scheme, row.kernel, row.tokens) == (f"50% {mask}", "reference", 2)
    assert row.passed
    assert row.without_early_start_us is None


def test_three_layers_are_measured_in_their_own_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="three-layer"):
        bench_sparse.SparseWeights((96, 128), CPU, torch.bfloat16, asked="three-layer")
    monkeypatch.setattr(bench_sparse, "arrange", lambda weight, asked: three_layer.arrange(weight))
    row = cell(bench_sparse.SparseWeights((96, 128), CPU, torch.bfloat16), 2, Limits(1e12, 1e15))
    assert row.passed


def test_a_scheme_that_drops_more_is_measured_with_less() -> None:
    row = scheme("SPARSE50").with_sparsity(0.7, None)
    found = list(bench_kernels([(row, (96, 128))], [1], CPU, Limits(1e12, 1e15), silent))
    half = list(bench_kernels([(scheme("SPARSE50"), (96, 128))], [1], CPU, Limits(1e12, 1e15), silent))
    assert found[0].passed and found[0].floor_us < half[0].floor_us


def test_what_the_masks_keep() -> None:
    iid, wanda = (bench_sparse.random_weight((64, 256), CPU, torch.bfloat16, mask, 0.3) for mask in ("iid", "wanda"))
    assert all(bool((weight.view(torch.int16) != -(2**15)).all()) for weight in (iid, wanda))
    assert abs(float((iid != 0).float().mean()) - 0.3) < 0.02
    assert set((wanda != 0).sum(1).tolist()) == {round(0.3 * 256)}
    by_column = [(weight != 0).float().mean(0).std() for weight in (iid, wanda)]
    assert by_column[1] > 3 * by_column[0]
