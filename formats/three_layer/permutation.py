"""The order of input channels in which a mask packs best.

Groups overflow where columns are dense and stay empty where they are sparse. Dealing the columns out by density, a
dense one and a sparse one to each group, brings every group near two and every tile near balance. Masks that follow a
2:4 pattern are best left alone; which of the two orders is better is counted, not guessed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .groups import GROUP, SLOTS
from .tiles import COLUMNS, ROWS

DUMMIES = 0.12
"""Dummies for each value that is moved, about; enough to compare orders and to estimate sizes."""


def best_order(mask: Tensor, value_bytes: int) -> Tensor:
    """Where each stored column comes from, int32 [in], for `mask` bool [out, in] of the nonzeros."""
    same = torch.arange(mask.shape[1], device=mask.device)
    dealt = balanced(mask.sum(0))
    best = dealt if _bytes(mask.index_select(1, dealt), value_bytes) < _bytes(mask, value_bytes) else same
    return best.to(torch.int32)


def balanced(counts: Tensor) -> Tensor:
    """Columns dealt out to groups of four by their `counts` of nonzeros [in]; what fills no group comes last."""
    order = counts.argsort(descending=True, stable=True)
    whole = order.shape[0] // GROUP
    quarters = order[: GROUP * whole].view(GROUP, whole)
    dealt = torch.stack([quarters[0], quarters[1].flip(0), quarters[2], quarters[3].flip(0)], dim=1)
    return torch.cat([dealt.flatten(), order[GROUP * whole :]])


def _bytes(mask: Tensor, value_bytes: int) -> float:
    """Bytes that the second and third layer would take, about."""
    in_features = mask.shape[1]
    present = torch.nn.functional.pad(mask, (0, -in_features % GROUP)).view(torch.uint8).unflatten(1, (-1, GROUP))
    count = present[..., 0] + present[..., 1] + present[..., 2] + present[..., 3]
    surplus, empty = _by_tile(count.clamp(min=SLOTS) - SLOTS), _by_tile(SLOTS - count.clamp(max=SLOTS))
    moved = torch.minimum(surplus, empty).sum()
    return float(moved) * (1 + DUMMIES) + float(surplus.sum() - moved) * (value_bytes + 4)


def _by_tile(counts: Tensor) -> Tensor:
    """Sums of `counts` [rows, groups] over the tiles."""
    rows, wide = counts.shape[0], COLUMNS // GROUP
    whole = torch.nn.functional.pad(counts, (0, -counts.shape[1] % wide, 0, -rows % ROWS))
    return whole.unflatten(1, (-1, wide)).sum(-1, dtype=torch.int16).unflatten(0, (-1, ROWS)).sum(1, dtype=torch.int32)
