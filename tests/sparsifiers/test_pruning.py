"""The composition: the linear's own ratio, the stored dtype, the refit where it is asked for."""

from __future__ import annotations

import pytest
import torch

from compress_llm.calibration.statistics import output_error
from compress_llm.formats.sparsity import PATTERNS, Sparsity
from compress_llm.sparsifiers.method import Sparsifier
from compress_llm.sparsifiers.pruning import Pruning
from compress_llm.sparsifiers.registry import SPARSIFIERS
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


@pytest.mark.parametrize("sparsifier", SPARSIFIERS.values(), ids=SPARSIFIERS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("again", [False, True])
def test_what_is_dropped_is_plus_zero(sparsifier: Sparsifier, pattern: str, again: bool, case: Case) -> None:
    """-0.0 would be stored, on disk and by kernels."""
    weight, stats = case()
    pruning = Pruning(sparsifier, sparsifier.options, refit=again)
    found = pruning.apply(weight, Sparsity(pattern=pattern), None, stats, torch.bfloat16)
    assert int((found.bfloat16().view(torch.int16) != 0).sum()) == weight.numel() // 2


def test_without_statistics_magnitude_decides() -> None:
    weight = torch.randn(4, 8)
    found = Pruning(WANDA, refit=True).without_statistics().apply(weight, Sparsity(), None, None, torch.float32)
    assert int((found == 0).sum()) == 16
