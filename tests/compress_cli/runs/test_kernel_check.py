"""A kernel that computes something else, or not the same twice, is found; one that is right passes."""

from __future__ import annotations

import pytest
import torch

from compress_llm.compress_cli.runs import kernel_check
from compress_llm.compress_cli.runs.bench_kernels import random_weight
from compress_llm.compress_cli.runs.kernel_check import KernelChecks
from compress_llm.compress_cli.runs.stored import Packed
from compress_llm.formats.packings import packing
from compress_llm.formats.pruned import Pruned
from compress_llm.formats.scheme import SCHEMES, scheme
from compress_llm.kernels.lowbit.packed import misfit
from compress_llm.kernels.sparse import three_layer

CPU = torch.device("cpu")


def look(name: str, group: int | None = 32) -> KernelChecks:
    row = scheme(name)
    row = row.with_group(group) if group and row.groupable and row.group_size else row
    checks = KernelChecks(CPU)
    for number in range(2):
        tensors = random_weight(row, (72, 128), torch.bfloat16, CPU)
        checks.look(Packed(f"linear.{number}", row, (72, 128), {}), tensors)
    return checks


@pytest.mark.parametrize("name", [name for name, row in SCHEMES.items() if row.rounds])
def test_what_is_right_passes_and_is_looked_at_once(name: str) -> None:
    result = look(name).result()
    assert result.passed, result.detail
    known = misfit(scheme(name)) is None
    assert result.detail == ("1 shapes on cpu: reference" if known else "0 shapes on cpu: nothing to run")


def test_a_small_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernel_check.product
    monkeypatch.setattr(kernel_check, "product", lambda *given: right(*given) * 1.01)
    result = look("W4A16").result()
    assert not result.passed
    assert "'linear.0' times 1 tokens by reference: an error of " in result.detail


def test_results_that_change_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernel_check.product
    monkeypatch.setattr(kernel_check, "product", lambda *given: right(*given) * (1 + torch.rand(1).bfloat16()))
    assert "two runs differ" in look("W8A8").result().detail


def test_without_a_layout_there_is_nothing_to_run() -> None:
    assert look("W4A16", group=16).result().detail == "0 shapes on cpu: nothing to run"


@pytest.mark.parametrize("wrong", [1.0, 1.01])
@pytest.mark.parametrize("layout", SCHEMES["SPARSE50"].layouts)
def test_sparse_weights_are_looked_at_too(layout: str, wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    row = scheme("SPARSE50").with_layout(layout)
    weight = torch.randn(72, 96).bfloat16().masked_fill(torch.rand(72, 96) < 0.5, 0)
    right = kernel_check.sparse_product.product
    monkeypatch.setattr(kernel_check.sparse_product, "product", lambda *given: right(*given) * wrong)
    checks = KernelChecks(CPU)
    checks.look(Packed("linear", row, (72, 96), {}), packing(row).pack(Pruned(row, weight)))
    assert checks.result().passed == (wrong == 1.0), checks.result().detail
    assert len(checks.seen) == 1


def test_three_layers_are_looked_at_where_they_are_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    row, seen = scheme("SPARSE50"), []
    weight = torch.randn(72, 96).bfloat16().masked_fill(torch.rand(72, 96) < 0.5, 0)
    monkeypatch.setattr(
        kernel_check.sparse_product, "arrange", lambda given: seen.append(three_layer.arrange(given)) or seen[-1]
    )
    checks = KernelChecks(CPU)
    checks.look(Packed("linear", row, (72, 96), {}), packing(row).pack(Pruned(row, weight)))
    assert seen and checks.result().passed, checks.result().detail
