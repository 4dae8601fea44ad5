"""The grid of tiles: 64 rows by 128 columns, inside which surplus values are moved, so that a kernel needs no other.

Tiles are numbered along the rows of tiles. Those at the right and lower edge of a weight are smaller: slots that would
lie outside of it are neither stored nor counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .groups import GROUP, SLOTS

ROWS, COLUMNS = 64, 128


@dataclass(frozen=True)
class Grid:
    """The tiles of a weight [out, in]."""

    out_features: int
    in_features: int

    @property
    def groups(self) -> int:
        """Groups of four a row, the last one filled up with zeros."""
        return -(-self.in_features // GROUP)

    @property
    def strips(self) -> int:
        """Rows of tiles."""
        return -(-self.out_features // ROWS)

    @property
    def across(self) -> int:
        """Tiles in a row of tiles."""
        return -(-self.in_features // COLUMNS)

    @property
    def tiles(self) -> int:
        """All of them."""
        return self.strips * self.across

    def slots(self) -> Tensor:
        """How many slots each tile has: int64 [tiles]."""
        rows = torch.full((self.strips,), ROWS)
        rows[-1] = self.out_features - ROWS * (self.strips - 1)
        wide = torch.tensor([slots.stop - slots.start for *_, slots in self.columns()])
        return torch.outer(rows, wide).flatten()

    def columns(self) -> Iterator[tuple[int, slice, slice, slice]]:
        """For each column of tiles its number, and what it covers of columns, groups and slots of a row."""
        wide = COLUMNS // GROUP
        for number in range(self.across):
            first, last = number * wide, min(self.groups, (number + 1) * wide)
            covers = (slice(first * unit, last * unit) for unit in (GROUP, 1, SLOTS))
            yield (number, *covers)  # type: ignore[misc]
