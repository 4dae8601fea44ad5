"""Which linear gives up how much, at a fixed average over the model: `owl` by block, `error` by linear.

`owl` is outlier-weighed layerwise sparsity (Yin et al. 2023, arXiv 2310.05175): a block keeps more the larger the share
of its weights whose Wanda score is several times the mean of the block. `error` looks at what each linear's output
loses at several ratios, and takes weights away where the next ones cost least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from ..calibration.statistics import Stats, output_error
from .masks import of_rows
from .wanda import scores

RULES = ("owl", "error")
OUTLIER, SPREAD = 5.0, 0.08
"""How many times the mean makes an outlier, and how far from the average a block may go; both as published."""
RANGE, STEPS = 0.1, 8
"""How far from the average a linear may go by error, and in how many steps from end to end."""


@dataclass
class Measured:
    """What the dense model shows of its blocks: scores of outliers by block, loss at `offsets` by linear."""

    ratio: float
    rule: str
    sizes: dict[str, int] = field(default_factory=dict)
    block: dict[str, int] = field(default_factory=dict)
    outliers: dict[int, float] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)

    def add(self, block: int, weights: Mapping[str, Tensor], stats: Mapping[str, Stats]) -> None:
        """Look at the linears of a block: `weights` float32 [out, in] and statistics of their inputs, by name.

        A linear that no token reached counts with the average ratio. Raises InputError without second moments.
        """
        seen = {name: weight for name, weight in weights.items() if stats[name].tokens > 0}
        for name, weight in seen.items():
            self.sizes[name], self.block[name] = weight.numel(), block
            if self.rule == "error":
                self.losses[name] = losses(weight, stats[name], offsets(self.ratio))
        if self.rule == "owl" and seen:
            self.outliers[block] = outlier_share([scores(weight, stats[name]) for name, weight in seen.items()])

    def ratios(self) -> dict[str, float]:
        """The share of dropped weights of every linear that was looked at."""
        if self.rule == "owl":
            blocks = dict.fromkeys(self.outliers, 0)
            for name, size in self.sizes.items():
                blocks[self.block[name]] += size
            by_block = owl(self.outliers, blocks, self.ratio)
            return {name: by_block[number] for name, number in self.block.items()}
        return by_error(self.losses, self.sizes, offsets(self.ratio), self.ratio)


def offsets(ratio: float) -> list[float]:
    """The ratios that losses are measured at, ascending."""
    return [ratio - RANGE + 2 * RANGE * step / STEPS for step in range(STEPS + 1)]


def losses(weight: Tensor, stats: Stats, ratios: Sequence[float]) -> list[float]:
    """The share of the output's energy that dropping the lowest Wanda scores takes, at each ratio."""
    score = scores(weight, stats)
    second_moment = stats.second_moment
    if second_moment is None:
        return [0.0] * len(ratios)
    whole = output_error(weight, second_moment)
    lost = [output_error(weight * of_rows(score, ratio, None), second_moment) for ratio in ratios]
    return [one / whole if whole > 0 else 0.0 for one in lost]


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
    found: Mapping[str, Sequence[float]], sizes: Mapping[str, int], ratios: Sequence[float], average: float
) -> dict[str, float]:
    """Ratios by linear: from the least of `ratios` up, always the step under which a share of the output is lost least.

    That minimises the sum of the losses, each times the size of its linear. `found` are losses at `ratios`; of one that
    does not grow convexly the lower hull counts. The average over the weights is `average` exactly: the last step is
    taken in part.
    """
    steps = [
        ((after - before) / (to - here), name, here, to)
        for name, values in found.items()
        for (here, before), (to, after) in _hull(list(zip(ratios, values, strict=True)))
    ]
    chosen = dict.fromkeys(found, ratios[0])
    left = sum((average - ratios[0]) * sizes[name] for name in found)
    for _, name, here, to in sorted(steps):
        taken = min(to - here, left / sizes[name])
        if taken <= 0:
            break
        chosen[name] = here + taken
        left -= taken * sizes[name]
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
