"""The refit against exact solutions row by row, and the promise that it never makes a row worse."""

from __future__ import annotations

import pytest
import torch

from compress_llm.sparsifiers import refit as module
from compress_llm.sparsifiers.magnitude import MAGNITUDE
from compress_llm.sparsifiers.method import Sparsifier
from compress_llm.sparsifiers.refit import refit
from compress_llm.sparsifiers.sparsegpt import SPARSEGPT
from compress_llm.sparsifiers.wanda import WANDA

from .conftest import Case


def row_errors(weight: torch.Tensor, other: torch.Tensor, second_moment: torch.Tensor) -> torch.Tensor:
    error = (weight - other).double()
    return ((error @ second_moment.double()) * error).sum(1)


def test_it_is_the_damped_least_squares_solution(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, stats = case(seed=2)
    assert stats.second_moment is not None
    monkeypatch.setattr(module, "STEPS", 200)
    monkeypatch.setattr(module, "ENOUGH", 1e-6)
    pruned = WANDA.function(weight, 0.5, None, stats, {})
    found = refit(weight, pruned, stats.second_moment, torch.float32)
    damped = stats.second_moment.double()
    damped = damped + module.DAMP * damped.diagonal().mean() * torch.eye(64, dtype=torch.float64)
    for row in range(weight.shape[0]):
        kept = pruned[row] != 0
        exact = torch.linalg.solve(damped[kept][:, kept], damped[kept] @ weight[row].double())
        torch.testing.assert_close(found[row, kept].double(), exact, rtol=1e-3, atol=1e-5)
        assert not found[row, ~kept].any()


@pytest.mark.parametrize("method", [MAGNITUDE, WANDA, SPARSEGPT], ids=lambda method: method.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [8, 512])  # fewer tokens than inputs leave H singular
def test_no_row_gets_worse(case: Case, method: Sparsifier, dtype: torch.dtype, tokens: int) -> None:
    weight, stats = case(tokens=tokens, seed=5)
    assert stats.second_moment is not None
    pruned = method.function(weight, 0.5, None, stats, method.options)
    found = refit(weight, pruned, stats.second_moment, dtype)
    before = row_errors(weight, pruned.to(dtype).float(), stats.second_moment)
    after = row_errors(weight, found, stats.second_moment)
    assert (after <= before * (1 + 1e-5) + 1e-9).all()
    assert torch.equal(found, found.to(dtype).float())
    assert not found[pruned == 0].any()
    if method is not SPARSEGPT:
        assert float(after.sum()) < 0.8 * float(before.sum())


def test_a_row_that_comes_out_worse_stays(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, stats = case()
    assert stats.second_moment is not None
    pruned = WANDA.function(weight, 0.5, None, stats, {})
    monkeypatch.setattr(module, "_solve", lambda weight, pruned, second_moment: pruned * 3)
    assert torch.equal(refit(weight, pruned, stats.second_moment, torch.float32), pruned)


def test_nothing_kept_and_nothing_seen_is_left_alone() -> None:
    empty = torch.zeros(2, 4)
    assert torch.equal(refit(torch.ones(2, 4), empty, torch.eye(4), torch.float32), empty)
    some = torch.tensor([[1.0, 0, 0, 1]])
    assert torch.equal(refit(torch.ones(1, 4), some, torch.zeros(4, 4), torch.float32), some)
