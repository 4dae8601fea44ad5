"""The first layer: of every aligned group of four, two values with their positions, as a 2:4 tensor core wants them.

A group with more nonzeros than two has a surplus. It can only lie at the two positions that the first layer does not
use, the *complement*, so a surplus is addressed like a value of the first layer: by row, group, and first or second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP, SLOTS = 4, 2


def _pairs() -> Iterator[tuple[int, int, int, int]]:
    """By mask of nonzeros (bit i for position i): the two positions that are kept, and the other two."""
    for mask in range(1 << GROUP):
        taken = [place for place in range(GROUP) if mask >> place & 1][:SLOTS]
        spare = [place for place in range(GROUP) if place not in taken]
        kept = sorted(taken + spare[: SLOTS - len(taken)])
        rest = [place for place in range(GROUP) if place not in kept]
        yield kept[0], kept[1], rest[0], rest[1]


_BY_MASK = tuple(_pairs())
_COMPLEMENT = {(row[0], row[1]): (row[2], row[3]) for row in _BY_MASK}


@dataclass(frozen=True)
class Groups:
    """`pairs` uint8 [rows, groups], first position in bits 0–1, second in bits 2–3; `kept` and `surplus`
    [rows, groups, 2] the values there and at the complement, as integers, 0 where there is none."""

    pairs: Tensor
    kept: Tensor
    surplus: Tensor


def split(bits: Tensor) -> Groups:
    """Take `bits` [rows, 4·groups] apart."""
    grouped = bits.unflatten(1, (-1, GROUP))
    present = (grouped != 0).view(torch.uint8)
    masks = present[..., 0] | present[..., 1] << 1 | present[..., 2] << 2 | present[..., 3] << 3
    places = torch.tensor(_BY_MASK, device=bits.device)[masks.int()]
    values = grouped.gather(-1, places)
    pairs = (places[..., 0] | places[..., 1] << 2).to(torch.uint8)
    return Groups(pairs, values[..., :SLOTS].contiguous(), values[..., SLOTS:].contiguous())


def complement(pairs: Tensor) -> Tensor:
    """All four positions of groups with these `pairs`: the two, then the complement; int64 [rows, groups, 4].

    Raises ValueError for a code that is no pair of ascending positions.
    """
    table = torch.full((16, GROUP), -1, dtype=torch.int64)
    for (first, second), rest in _COMPLEMENT.items():
        table[first | second << 2] = torch.tensor([first, second, *rest])
    places = table.to(pairs.device)[pairs.int()]
    if bool((places < 0).any()):
        raise ValueError("two positions of a group are not in ascending order")
    return places


def join(groups: Groups) -> Tensor:
    """The inverse of `split`. Raises ValueError for a code that is no pair of ascending positions."""
    values = torch.cat([groups.kept, groups.surplus], dim=-1)
    return torch.zeros_like(values).scatter_(-1, complement(groups.pairs), values).flatten(1)


def pack_pairs(pairs: Tensor) -> Tensor:
    """`pairs` [rows, groups], four bits each, two a byte and the first of them low: uint8 [rows, ⌈groups / 2⌉]."""
    even = torch.nn.functional.pad(pairs, (0, pairs.shape[1] % 2))
    return even[:, 0::2] | even[:, 1::2] << 4


def unpack_pairs(packed: Tensor, groups: int) -> Tensor:
    """The inverse of `pack_pairs`."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)[:, :groups]
