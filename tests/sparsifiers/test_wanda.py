"""Wanda against its definition, written out in float64 over the inputs themselves."""

from __future__ import annotations

import pytest
import torch

from compress_llm.calibration.statistics import Stats
from compress_llm.formats.errors import InputError
from compress_llm.sparsifiers.wanda import WANDA


def published(weight: torch.Tensor, x: torch.Tensor, ratio: float, group: tuple[int, int] | None) -> torch.Tensor:
    """Section 3 of the paper, row by row: sort |W| · ‖x‖, drop the first part of each row or group."""
    kept = weight.clone()
    norms = x.double().square().sum(0).sqrt()
    for row in range(weight.shape[0]):
        score = weight[row].double().abs() * norms
        span = weight.shape[1] if group is None else group[1]
        count = round(ratio * span) if group is None else group[0]
        for start in range(0, weight.shape[1], span):
            for place in score[start : start + span].argsort(stable=True)[:count].tolist():
                kept[row, start + place] = 0
    return kept


@pytest.mark.parametrize(("ratio", "group"), [(0.5, None), (0.3, None), (0.7, None), (0.5, (2, 4)), (0.5, (4, 8))])
def test_the_published_rule(ratio: float, group: tuple[int, int] | None) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 48, generator=generator) * torch.linspace(0.1, 4, 48)
    weight = torch.randn(10, 48, generator=generator)
    stats = Stats()
    stats.add(x, ["second_moment"])
    assert torch.equal(WANDA.function(weight, ratio, group, stats, {}), published(weight, x, ratio, group))


def test_missing_statistics_are_named() -> None:
    with pytest.raises(InputError, match="--method wanda: needs calibration statistics"):
        WANDA.function(torch.ones(2, 4), 0.5, None, None, {})
