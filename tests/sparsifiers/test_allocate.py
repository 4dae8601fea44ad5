"""Ratios by layer: the average is kept, and what is lost is less than with one ratio for all."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from compress_llm.calibration.statistics import Stats
from compress_llm.sparsifiers.allocate import (
    OUTLIER,
    SPREAD,
    Loss,
    Measured,
    by_error,
    offsets,
    outlier_share,
    owl,
)

from .conftest import Case


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
    cheap, dear = [0.0, 0.01, 0.02], [0.0, 0.1, 0.3]
    assert by_error({0: cheap, 1: dear}, {0: 100, 1: 100}, ratios, 0.5) == pytest.approx({0: 0.6, 1: 0.4})
    uneven = by_error({0: cheap, 1: dear}, {0: 100, 1: 300}, ratios, 0.5)
    assert (uneven[0] * 100 + uneven[1] * 300) / 400 == pytest.approx(0.5)
    assert uneven[0] == pytest.approx(0.6)


def test_a_loss_that_is_not_convex_counts_by_its_hull() -> None:
    found = by_error({0: [0.0, 0.3, 0.3], 1: [0.0, 0.1, 0.2]}, {0: 1, 1: 1}, [0.4, 0.5, 0.6], 0.5)
    assert found == pytest.approx({0: 0.4, 1: 0.6})


@pytest.mark.parametrize("rule", ["owl", "error"])
def test_the_average_over_the_weights_is_kept(rule: str, case: Case) -> None:
    measured = Measured(0.5, rule)
    sizes: dict[str, int] = {}
    for block in range(3):
        weights, stats = {}, {}
        for name, out in (("q", 16), ("down", 40)):
            weights[f"{block}.{name}"], stats[f"{block}.{name}"] = case(out=out, seed=block)
            weights[f"{block}.{name}"] *= torch.rand(64).exp() ** (4 * block)
        measured.add(block, weights, stats, dropped(block + 1))
        sizes |= {name: weight.numel() for name, weight in weights.items()}
    ratios = measured.ratios()
    assert ratios.keys() == sizes.keys()
    assert sum(ratios[name] * sizes[name] for name in ratios) / sum(sizes.values()) == pytest.approx(0.5)
    assert len(set(ratios.values())) > 1
    assert all(0.33 < ratio < 0.67 for ratio in ratios.values())
    assert ratios["1.q"] == ratios["1.down"]


def dropped(weight: float) -> Loss:
    """A block that loses `weight` times the squared share of its weights that are gone."""

    def loss(weights: Mapping[str, Tensor]) -> float:
        zeros = sum(int((part == 0).sum()) for part in weights.values())
        return weight * (zeros / sum(part.numel() for part in weights.values())) ** 2

    return loss


def test_losses_are_asked_for_at_every_ratio_and_unseen_linears_left_out(case: Case) -> None:
    weight, stats = case()
    measured = Measured(0.5, "error")
    measured.add(0, {"a": weight, "b": weight}, {"a": stats, "b": Stats()}, dropped(1))
    measured.add(1, {"c": weight}, {"c": Stats()}, dropped(1))
    assert measured.losses == {0: pytest.approx([ratio**2 for ratio in offsets(0.5)], rel=0.05)}
    assert measured.ratios() == {"a": pytest.approx(0.5)}
