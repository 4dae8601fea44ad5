"""Which block gives up how much, at a fixed average over the model.

`owl` is outlier-weighed layerwise sparsity (Yin et al. 2023, arXiv 2310.05175): a block keeps more the larger the share
of its weights whose Wanda score is several times the mean of the block. `error` looks at how far the block's output
moves at several ratios, and takes weights away where the next ones cost least. Errors of single linears are no such
currency: by them q and k would pay for v and up, and the model be worse than under one ratio (bookllama-7m, Wanda: KL
.505 by linears, .452 with one ratio, .423 by owl, .413 by blocks).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from ..calibration.statistics import Stats
from .masks import of_rows
from .wanda import scores

RULES = ("owl", "error")
OUTLIER, SPREAD = 5.0, 0.08
"""How many times the mean makes an outlier, and how far from the average a block may go; both as published."""
RANGE, STEPS = 0.08, 4
"""How far from the average a block may go by error, and in how many steps from end to end."""

Loss = Callable[[Mapping[str, Tensor]], float]
"""How far a block's output moves with these weights in place of its own, by name of the linear."""


@dataclass
class Measured:
    """What the dense model shows of its blocks: their `linears` and sizes, and what the rule looks at of each."""

    ratio: float
    rule: str
    linears: dict[int, list[str]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    outliers: dict[int, float] = field(default_factory=dict)
    losses: dict[int, list[float]] = field(default_factory=dict)

    def add(self, block: int, weights: Mapping[str, Tensor], stats: Mapping[str, Stats], loss: Loss) -> None:
        """Look at the linears of a block: `weights` float32 [out, in] and statistics of their inputs, by name.

        Linears that no token reached are left out. Raises InputError without second moments.
        """
        found = {name: scores(weight, stats[name]) for name, weight in weights.items() if stats[name].tokens > 0}
        if not found:
            return
        self.linears[block], self.sizes[block] = list(found), sum(score.numel() for score in found.values())
        if self.rule == "owl":
            self.outliers[block] = outlier_share(list(found.values()))
            return
        self.losses[block] = [
            loss({name: weights[name].masked_fill(of_rows(found[name], ratio, None), 0.0) for name in found})
            for ratio in offsets(self.ratio)
        ]

    def ratios(self) -> dict[str, float]:
        """The share of dropped weights of every linear that was looked at."""
        if self.rule == "owl":
            by_block = owl(self.outliers, self.sizes, self.ratio)
        else:
            by_block = by_error(self.losses, self.sizes, offsets(self.ratio), self.ratio)
        return {name: by_block[block] for block, names in self.linears.items() for name in names}


def offsets(ratio: float) -> list[float]:
    """The ratios that losses are measured at, ascending."""
    return [ratio - RANGE + 2 * RANGE * step / STEPS for step in range(STEPS + 1)]


def outlier_share(found: Sequence[Tensor]) -> float:
    """The share of all `found` scores that are larger than `OUTLIER` times their mean."""
    count = sum(score.numel() for score in found)
    mean = sum(float(score.sum(dtype=torch.float64)) for score in found) / count
    return sum(int((score > OUTLIER * mean).sum()) for score in found) / count


def owl(outliers: Mapping[int, float], sizes: Mapping[int, int], ratio: float) -> dict[int, float]:
    """Ratios by block, at most `SPREAD` from end to end on either side, that average to `ratio` over the weights."""
    low, high = min(outliers.values()), max(outliers.values())
    if high == low:
        return dict.fromkeys(outliers, ratio)
    shifts = {number: -2 * SPREAD * (share - low) / (high - low) for number, share in outliers.items()}
    total = sum(sizes[number] for number in shifts)
    mean = sum(shifts[number] * sizes[number] for number in shifts) / total
    return {number: ratio + shift - mean for number, shift in shifts.items()}


def by_error(
    found: Mapping[int, Sequence[float]], sizes: Mapping[int, int], ratios: Sequence[float], average: float
) -> dict[int, float]:
    """Ratios by block: from the least of `ratios` up, always the step that costs least for each weight.

    That minimises the sum of the losses. `found` are losses at `ratios`; of one that does not grow convexly the lower
    hull counts. The average over the weights is `average` exactly: the last step is taken in part.
    """
    steps = [
        ((after - before) / ((to - here) * sizes[block]), block, here, to)
        for block, values in found.items()
        for (here, before), (to, after) in _hull(list(zip(ratios, values, strict=True)))
    ]
    chosen = dict.fromkeys(found, ratios[0])
    left = sum((average - ratios[0]) * sizes[block] for block in found)
    for _, block, here, to in sorted(steps):
        taken = min(to - here, left / sizes[block])
        if taken <= 0:
            break
        chosen[block] = here + taken
        left -= taken * sizes[block]
    return chosen


def _hull(points: list[tuple[float, float]]) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """The segments of the lower convex hull of `points`, which ascend in their first coordinate."""
    kept: list[tuple[float, float]] = []
    for point in points:
        while len(kept) > 1 and _slope(kept[-2], kept[-1]) >= _slope(kept[-1], point):
            kept.pop()
        kept.append(point)
    return list(pairwise(kept))


def _slope(one: tuple[float, float], other: tuple[float, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])
