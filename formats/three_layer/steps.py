"""The second layer: surplus values moved into empty slots of the first, addressed by steps of four bits.

The k-th empty slot of a tile takes the k-th surplus value, both counted along the rows. A byte holds the step of the
*source*, the slot in which the value lies (low nibble), and that of the *destination*, the slot of the complement where
it belongs (high nibble), each from the entry before; the first is counted from -1. Steps of an entry are 1 … 15. A byte
with a zero nibble is a dummy: it moves on and stands for no value, the nibble that is not zero as it says, and both by
15 where both are zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

REACH = 15


@dataclass(frozen=True)
class Moves:
    """Entries in order: `tile` (ascending), `source` and `destination` slot inside it, all int64 [entries]."""

    tile: Tensor
    source: Tensor
    destination: Tensor


def pair(empty: Tensor, surplus: Tensor) -> tuple[Moves, Tensor]:
    """Give surplus values empty slots, by tile. Both are bool [tiles, slots]; also returns the surplus left over."""
    empty_rank, surplus_rank = empty.cumsum(1), surplus.cumsum(1)
    count = torch.minimum(empty_rank[:, -1:], surplus_rank[:, -1:])
    moved = surplus & (surplus_rank <= count)
    tile, source = (empty & (empty_rank <= count)).nonzero(as_tuple=True)
    return Moves(tile, source, moved.nonzero(as_tuple=True)[1]), surplus & ~moved


def encode(moves: Moves, tiles: int) -> tuple[Tensor, Tensor]:
    """The bytes (uint8) of all tiles one after the other, and how many each has (int64 [tiles])."""
    low, high = _steps(moves.tile, moves.source), _steps(moves.tile, moves.destination)
    low_extra, high_extra = (low - 1) // REACH, (high - 1) // REACH  # dummies that each of the two asks for
    extra = torch.maximum(low_extra, high_extra)
    of = torch.repeat_interleave(extra + 1)  # byte -> entry
    ends = (extra + 1).cumsum(0)
    number = torch.arange(of.shape[0], device=of.device) - (ends - extra - 1)[of]
    both = (number < low_extra[of]) & (number < high_extra[of])
    low_byte = _nibble(low, low_extra, extra, of, number).masked_fill_(both, 0)
    high_byte = _nibble(high, high_extra, extra, of, number).masked_fill_(both, 0)
    counts = torch.zeros(tiles, dtype=torch.int64, device=of.device).index_add_(0, moves.tile, extra + 1)
    return (low_byte | high_byte << 4).to(torch.uint8), counts


def _steps(tile: Tensor, slot: Tensor) -> Tensor:
    """From the entry before in the same tile, or from -1."""
    before = torch.full_like(slot, -1)
    before[1:] = torch.where(tile[1:] == tile[:-1], slot[:-1], -1)
    return slot - before


def _nibble(step: Tensor, own: Tensor, extra: Tensor, of: Tensor, number: Tensor) -> Tensor:
    """What one stream says in each byte: 15 in its own dummies, 0 in those of the other, the rest in the entry."""
    rest = (step - REACH * own)[of]
    return torch.where(number == extra[of], rest, torch.where(number < own[of], REACH, 0))


def decode(steps: Tensor, counts: Tensor) -> Moves:
    """The inverse of `encode`: `steps` uint8 of tiles one after the other, `counts` int64 [tiles]."""
    low, high = steps.long() & 15, steps.long() >> 4
    real = (low > 0) & (high > 0)
    both = (low == 0) & (high == 0)
    tile = torch.repeat_interleave(counts)
    source, destination = (_places(nibble.masked_fill(both, REACH), counts, tile) for nibble in (low, high))
    return Moves(tile[real], source[real], destination[real])


def reach(steps: Tensor, offsets: Tensor) -> Tensor:
    """How many slots the steps of each tile pass, of the sources and of the destinations: int64 [2, tiles].

    `offsets` int64 [tiles + 1] says where each tile's begin. No entry of a tile lies behind what it passes.
    """
    both = steps == 0
    passed = (nibble.masked_fill(both, REACH).cumsum(0) for nibble in (steps & 15, steps >> 4))
    return torch.stack([torch.nn.functional.pad(total, (1, 0))[offsets].diff() for total in passed])


def _places(advance: Tensor, counts: Tensor, tile: Tensor) -> Tensor:
    """Sums of `advance` inside each tile, less one."""
    total = torch.nn.functional.pad(advance.cumsum(0), (1, 0))
    return total[1:] - total[counts.cumsum(0) - counts][tile] - 1
