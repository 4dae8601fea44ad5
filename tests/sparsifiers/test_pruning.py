"""The composition: the linear's own ratio, the stored dtype, the refit where it is asked for."""

from __future__ import annotations

import torch

from compress_llm.calibration.statistics import output_error
from compress_llm.formats.sparsity import Sparsity
from compress_llm.sparsifiers.pruning import Pruning
from compress_llm.sparsifiers.wanda import WANDA

from .conftest import Case


def test_the_linears_own_ratio_wins(case: Case) -> None:
    weight, stats = case()
    pruning = Pruning(WANDA)
    for ratio, zeros in ((None, 32), (0.25, 16)):
        found = pruning.apply(weight, Sparsity(), ratio, stats, torch.bfloat16)
        assert ((found == 0).sum(1) == zeros).all()
        assert torch.equal(found, found.to(torch.bfloat16).float())


def test_a_refit_loses_less(case: Case) -> None:
    weight, stats = case()
    assert stats.second_moment is not None
    plain, fitted = (
        Pruning(WANDA, refit=again).apply(weight, Sparsity(), None, stats, torch.float32) for again in (False, True)
    )
    assert torch.equal(plain != 0, fitted != 0)
    assert output_error(weight - fitted, stats.second_moment) < output_error(weight - plain, stats.second_moment)
    assert Pruning(WANDA, refit=True).needs == {"second_moment"}


def test_without_statistics_magnitude_decides() -> None:
    weight = torch.randn(4, 8)
    found = Pruning(WANDA, refit=True).without_statistics().apply(weight, Sparsity(), None, None, torch.float32)
    assert int((found == 0).sum()) == 16
