"""Wanda: of every output the weights go that matter least to it, |W_ij| · ‖x_j‖₂; the others stay as they are.

Sun et al. 2023, arXiv 2306.11695, section 3. The norms of the inputs are the square roots of the second moment's
diagonal.
"""

from __future__ import annotations

from torch import Tensor

from ..calibration.statistics import Stats
from ..formats.errors import InputError
from .masks import of_rows
from .method import Group, Options, Sparsifier


def prune_wanda(weight: Tensor, ratio: float, group: Group | None, stats: Stats | None, options: Options) -> Tensor:
    """Drop the lowest scores of every row, or of every group. Raises InputError without second moments."""
    del options
    return weight.masked_fill(of_rows(scores(weight, stats), ratio, group), 0.0)


def scores(weight: Tensor, stats: Stats | None) -> Tensor:
    """|W_ij| · ‖x_j‖₂, float32 [out, in]. Raises InputError without second moments."""
    if stats is None or stats.second_moment is None:
        raise InputError("--method wanda", "needs calibration statistics", "give a --dataset")
    return weight.abs() * stats.second_moment.diagonal().sqrt()


WANDA = Sparsifier("wanda", prune_wanda, needs=frozenset({"second_moment"}), rounding="gptq")
