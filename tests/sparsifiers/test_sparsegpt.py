"""SparseGPT: against a float64 transcription of the published algorithm, column by column."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress_llm.calibration.statistics import Stats, output_error
from compress_llm.formats.errors import InputError
from compress_llm.sparsifiers.magnitude import MAGNITUDE
from compress_llm.sparsifiers.sparsegpt import SPARSEGPT
from compress_llm.sparsifiers.wanda import WANDA

from .conftest import Case

Group = tuple[int, int] | None


def published(
    weight: Tensor, hessian: Tensor, ratio: float, group: Group, block: int, damp: float, act_order: bool
) -> Tensor:
    """Algorithm 1 of the paper without lazy batches: every column is taken off all later ones at once."""
    w, h = weight.double().clone(), hessian.double().clone()
    h += damp * h.diagonal().mean() * torch.eye(len(h), dtype=torch.float64)
    order = h.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(len(h))
    w, h = w[:, order], h[order][:, order]
    upper = torch.linalg.cholesky(torch.linalg.inv(h)).mH
    drop = torch.zeros(w.shape, dtype=torch.bool)
    for j in range(w.shape[1]):
        span = block if group is None else group[1]
        if j % span == 0:
            here = slice(j, min(j + span, w.shape[1]))
            score = w[:, here] ** 2 / upper.diagonal()[here] ** 2
            if group is None:
                edge = score.flatten().sort().values[round(ratio * score.numel()) - 1]
                drop[:, here] = score <= edge
            else:
                lowest = score.argsort(dim=1, stable=True)[:, : group[0]]
                drop[:, here] = torch.zeros_like(drop[:, here]).scatter(1, lowest, True)
        lost = w[:, j] * drop[:, j] / upper[j, j]
        w[:, j:] -= torch.outer(lost, upper[j, j:])
        w[drop[:, j], j] = 0
    back = torch.empty_like(w)
    back[:, order] = w
    return back


@pytest.mark.parametrize(("ratio", "group"), [(0.5, None), (0.3, None), (0.7, None), (0.5, (2, 4)), (0.5, (4, 8))])
@pytest.mark.parametrize("block", [128, 24])
@pytest.mark.parametrize("act_order", [False, True])
def test_the_published_algorithm(case: Case, ratio: float, group: Group, block: int, act_order: bool) -> None:
    weight, stats = case(seed=3)
    assert stats.second_moment is not None
    options = {"damp": 0.05, "act_order": act_order, "block": block}
    found = SPARSEGPT.function(weight, ratio, group, stats, options)
    wanted = published(weight, stats.second_moment, ratio, group, block, 0.05, act_order and group is None)
    assert torch.equal(found != 0, wanted != 0)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-6)
    assert not torch.signbit(found[found == 0]).any()


def test_each_method_loses_less_than_the_one_before(case: Case) -> None:
    weight, stats = case(out=96, width=128, tokens=1024, seed=1)
    assert stats.second_moment is not None
    for group in (None, (2, 4)):
        lost = [
            output_error(weight - method.function(weight, 0.5, group, stats, method.options), stats.second_moment)
            for method in (MAGNITUDE, WANDA, SPARSEGPT)
        ]
        assert lost[2] < 0.95 * lost[1] < 0.95 * lost[0]


def test_patterns_hold_whatever_the_block(case: Case) -> None:
    weight, stats = case()
    for block in (1, 3, 12):
        pruned = SPARSEGPT.function(weight, 0.5, (4, 8), stats, {**SPARSEGPT.options, "block": block})
        assert ((pruned != 0).view(24, 8, 8).sum(-1) == 4).all()


def test_weights_of_inputs_that_are_never_active_go_first() -> None:
    x = torch.randn(300, 32)
    x[:, ::4] = 0
    stats = Stats()
    stats.add(x, ["second_moment"])
    pruned = SPARSEGPT.function(torch.randn(8, 32), 0.5, None, stats, SPARSEGPT.options)
    assert not pruned[:, ::4].any()
    assert pruned.isfinite().all()


def test_missing_statistics_are_named() -> None:
    with pytest.raises(InputError, match="--method sparsegpt: needs calibration statistics"):
        SPARSEGPT.function(torch.ones(2, 4), 0.5, None, None, SPARSEGPT.options)
