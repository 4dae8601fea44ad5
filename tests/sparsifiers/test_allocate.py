"""Ratios by layer: the average is kept, and what is lost is less than with one ratio for all."""

from __future__ import annotations

import pytest
import torch

from compress_llm.calibration.statistics import Stats
from compress_llm.sparsifiers.allocate import OUTLIER, SPREAD, Measured, by_error, losses, offsets, outlier_share, owl

from .conftest import Case


def average(ratios: dict[str, float], sizes: dict[str, int]) -> float:
    return sum(ratios[name] * sizes[name] for name in ratios) / sum(sizes.values())


def test_owl_follows_its_formula() -> None:
    found = owl({0: 0.01, 1: 0.03, 2: 0.02}, {0: 10, 1: 10, 2: 10}, 0.6)
    assert found == pytest.approx({0: 0.6 + SPREAD, 1: 0.6 - SPREAD, 2: 0.6})
    assert owl({0: 0.1, 1: 0.1}, {0: 1, 1: 9}, 0.5) == {0: 0.5, 1: 0.5}
    uneven = owl({0: 0.01, 1: 0.03}, {0: 10, 1: 30}, 0.5)
    assert (uneven[0] * 10 + uneven[1] * 30) / 40 == pytest.approx(0.5)


def test_outliers_are_counted_over_all_linears_of_a_block() -> None:
    ones = torch.ones(4, 24)
    high = torch.ones(1, 4)
    high[0, 0] = 100
    assert outlier_share([ones, high]) == pytest.approx(0.01)
    assert OUTLIER == 5


def test_by_error_takes_the_cheapest_steps() -> None:
    ratios = [0.4, 0.5, 0.6]
    found = {"cheap": [0.0, 0.01, 0.02], "dear": [0.0, 0.1, 0.3]}
    sizes = {"cheap": 100, "dear": 100}
    assert by_error(found, sizes, ratios, 0.5) == pytest.approx({"cheap": 0.6, "dear": 0.4})
    uneven = by_error(found, {"cheap": 100, "dear": 300}, ratios, 0.5)
    assert average(uneven, {"cheap": 100, "dear": 300}) == pytest.approx(0.5)
    assert uneven["cheap"] == pytest.approx(0.6)


def test_a_loss_that_is_not_convex_counts_by_its_hull() -> None:
    ratios = [0.4, 0.5, 0.6]
    found = by_error({"bumpy": [0.0, 0.3, 0.3], "plain": [0.0, 0.1, 0.2]}, {"bumpy": 1, "plain": 1}, ratios, 0.5)
    assert found == pytest.approx({"bumpy": 0.4, "plain": 0.6})


@pytest.mark.parametrize("rule", ["owl", "error"])
def test_the_average_over_the_weights_is_kept(rule: str, case: Case) -> None:
    measured = Measured(0.5, rule)
    sizes: dict[str, int] = {}
    for block in range(3):
        weights, stats = {}, {}
        for name, out in (("q", 16), ("down", 40)):
            weights[f"{block}.{name}"], stats[f"{block}.{name}"] = case(out=out, seed=block)
            weights[f"{block}.{name}"] *= torch.rand(64).exp() ** (4 * block)
        measured.add(block, weights, stats)
        sizes |= {name: weight.numel() for name, weight in weights.items()}
    ratios = measured.ratios()
    assert ratios.keys() == sizes.keys()
    assert average(ratios, sizes) == pytest.approx(0.5)
    assert len(set(ratios.values())) > 1
    assert all(0.35 < ratio < 0.65 for ratio in ratios.values())


def test_losses_grow_with_the_ratio_and_unseen_linears_are_left_out(case: Case) -> None:
    weight, stats = case()
    found = losses(weight, stats, offsets(0.5))
    assert found == sorted(found) and 0 < found[0] < found[-1] < 1
    measured = Measured(0.5, "error")
    measured.add(0, {"a": weight, "b": weight}, {"a": stats, "b": Stats()})
    assert measured.ratios().keys() == {"a"}
