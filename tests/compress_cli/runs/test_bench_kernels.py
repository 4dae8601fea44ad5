"""Cells of the bench: every scheme is measured against a dense product, and a wrong result is a fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compress_llm.compress_cli.runs import bench_kernels
from compress_llm.compress_cli.runs.bench_kernels import Weights, random_weight
from compress_llm.compress_cli.runs.timing import Limits, Timing
from compress_llm.formats.packings import packing
from compress_llm.formats.progress import silent
from compress_llm.formats.scheme import SCHEMES, scheme
from compress_llm.kernels.lowbit.packed import misfit

CPU = torch.device("cpu")
ROUNDED = [name for name, row in SCHEMES.items() if row.rounds]
CAN = Limits(1e10, 1e11)


@pytest.fixture(autouse=True)
def fixed_times(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Candidates are called once each; the packed product takes 2 µs, the dense one 6."""
    seen: list[list[str]] = []

    def timed(candidates, device):
        for calls in candidates.values():
            for call in calls:
                call()
        seen.append(list(candidates))
        return {name: Timing(6.0 if name == "dense" else 2.0, 1.0, 9.0) for name in candidates}

    monkeypatch.setattr(bench_kernels, "interleaved", timed)
    return seen


@pytest.mark.parametrize("name", [name for name, row in SCHEMES.items() if misfit(row) is None])
def test_a_cell_of_every_scheme(name: str, fixed_times: list) -> None:
    row = scheme(name).with_group(64) if scheme(name).groupable and scheme(name).group_size else scheme(name)
    cells = list(bench_kernels.bench_kernels([(row, (72, 128))], (1, 5), CPU, CAN, silent))
    assert [cell.tokens for cell in cells] == [1, 5]
    assert all(cell.passed and cell.repeats and cell.kernel == "reference" for cell in cells)
    assert {cell.speedup for cell in cells} == {3.0}
    assert cells[0].floor_us > 72 * 128 * row.grid.bits / 8 / CAN.bytes_per_second * 1e6
    assert fixed_times == [["packed", "dense"]] * 2


def test_a_wrong_product_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench_kernels.product
    monkeypatch.setattr(bench_kernels, "product", lambda *given, **more: right(*given, **more) + 0.5)
    cell = bench_kernels.cell(Weights(scheme("W4A16"), (72, 128), CPU, torch.bfloat16), 2, CAN)
    assert not cell.passed


@pytest.mark.parametrize("name", ROUNDED)
def test_random_weights_use_the_whole_grid(name: str) -> None:
    row = scheme(name)
    rounded = packing(row).unpack(random_weight(row, (64, 256), torch.bfloat16, CPU), row, (64, 256))
    values = row.grid.decode(rounded.codes)
    assert (float(values.min()), float(values.max())) == (row.grid.lowest, row.grid.highest)
    assert bool(rounded.dequantize().isfinite().all())


def test_a_cell_of_a_sparse_scheme(fixed_times: list) -> None:
    row = replace(scheme("W8A16"), packing="compress-bitmap")
    (cell,) = bench_kernels.bench_kernels([(row, (72, 128))], (1,), CPU, CAN, silent)
    assert cell.passed
    assert (cell.scheme, cell.group_size, cell.kernel) == ("W8A16", None, "reference")
