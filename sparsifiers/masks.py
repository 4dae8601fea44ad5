"""From scores to the weights that are dropped: the lowest of a row, of a whole weight, or of every few neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from .method import Group


def lowest(score: Tensor, count: int) -> Tensor:
    """The `count` lowest of every row of `score` [rows, n]: bool [rows, n]. Of equal scores the first ones."""
    if count <= 0:
        return torch.zeros_like(score, dtype=torch.bool)
    edge = score.kthvalue(count, dim=1, keepdim=True).values
    below, equal = score < edge, score == edge
    room = count - below.sum(1, keepdim=True)
    return below | (equal & (equal.cumsum(1) <= room))


def of_rows(score: Tensor, ratio: float, group: Group | None) -> Tensor:
    """What to drop of every row of `score` [rows, n] by itself: bool [rows, n]."""
    return of_groups(score, group) if group is not None else lowest(score, round(ratio * score.shape[1]))


def of_all(score: Tensor, ratio: float, group: Group | None) -> Tensor:
    """What to drop of the whole `score` [rows, n]: bool [rows, n]."""
    if group is not None:
        return of_groups(score, group)
    return lowest(score.reshape(1, -1), round(ratio * score.numel())).view(score.shape)


def of_groups(score: Tensor, group: Group) -> Tensor:
    """What to drop of every group of neighbours in the rows of `score` [rows, n], n a multiple of the group."""
    dropped, neighbours = group
    return lowest(score.reshape(-1, neighbours), dropped).view(score.shape)
