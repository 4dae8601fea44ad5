"""Magnitude pruning: the smallest weights of a linear go. The baseline, and the only one that needs no text."""

from __future__ import annotations

from torch import Tensor

from ..calibration.statistics import Stats
from .masks import of_all
from .method import Group, Options, Sparsifier


def prune_magnitude(weight: Tensor, ratio: float, group: Group | None, stats: Stats | None, options: Options) -> Tensor:
    """Drop the smallest |W| of the whole weight, or of every group."""
    del stats, options
    return weight.masked_fill(of_all(weight.abs(), ratio, group), 0.0)


MAGNITUDE = Sparsifier("magnitude", prune_magnitude)
