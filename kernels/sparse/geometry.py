"""How a sparse weight is cut into streams, each what one warp of the decode kernel reads from beginning to end.

The cut decides how many warps a GPU can keep busy and which sums a warp holds, so it is chosen once, when a weight is
brought into the layout, from its shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROWS, INPUTS = 16, 64
"""Of a step: what a warp decodes at once."""
MOST_WARPS, MOST_TILES = 16, 8
MOST_STEPS = 8  # of a block, whose masks a warp holds; a longer one would also make the kernels' code long
LEAST_STEPS = 8  # shorter streams are padded too much: every one ends at a whole row for all of its lanes
PROCESSORS = 132  # of an H100 or H200


@dataclass(frozen=True)
class Geometry:
    """`warps` streams side by side cover the inputs; a stream has `tiles` row tiles times `groups` groups of 64 inputs.

    Its steps go through a set of `together` row tiles at a time (the last set may have fewer): all groups of these,
    tile by tile within a group, so that they share x; then the next set. A *block* is `unroll` (1 or 2) groups of a
    set: at most MOST_STEPS steps. Kernels fetch masks and table a block ahead.
    """

    warps: int
    groups: int
    tiles: int
    together: int
    unroll: int

    @property
    def valid(self) -> bool:
        """Whether the numbers go together."""
        whole = self.groups % self.unroll == 0 and self.unroll <= 2
        return whole and self.together <= self.tiles and self.together * self.unroll <= MOST_STEPS

    @property
    def sets(self) -> list[int]:
        """Row tiles of each set."""
        return [min(self.together, self.tiles - first) for first in range(0, self.tiles, self.together)]

    @property
    def steps(self) -> int:
        """Steps of a stream."""
        return self.tiles * self.groups

    @property
    def blocks(self) -> int:
        """Blocks of a stream."""
        return len(self.sets) * self.groups // self.unroll

    @property
    def words(self) -> int:
        """Words of the table for a block."""
        return -(-self.together * self.unroll // 4)

    @property
    def rows(self) -> int:
        """Rows that a stream covers."""
        return self.tiles * ROWS

    @property
    def inputs(self) -> int:
        """Inputs that all streams of the same rows cover, padding included."""
        return self.warps * self.groups * INPUTS

    def bands(self, out_features: int) -> int:
        """How many times `rows` rows the weight has."""
        return -(-out_features // self.rows)

    def order(self) -> list[tuple[int, int]]:
        """(row tile, group) of each step."""
        return [
            (tile, group)
            for number, size in enumerate(self.sets)
            for group in range(self.groups)
            for tile in range(self.together * number, self.together * number + size)
        ]

    def slots(self) -> list[int]:
        """Where the table byte of each step is: `words` words a block, its steps in order, the rest unused."""
        sizes = [size for size in self.sets for _ in range(self.groups // self.unroll)]
        return [block * self.words * 4 + step for block, size in enumerate(sizes) for step in range(self.unroll * size)]

    def numbers(self) -> list[int]:
        """The five numbers, for an operator's arguments."""
        return [self.warps, self.groups, self.tiles, self.together, self.unroll]


def geometry(out_features: int, in_features: int) -> Geometry:
    """The cut for a weight of that shape.

    As many row tiles that all processors get the same; as many warps as there are, unless fewer leave much less padding
    or streams would be too short. All row tiles together, so that x is read once; and two groups a block where they
    fit.
    """
    tiles, groups = even_tiles(out_features), -(-in_features // INPUTS)
    most = min(MOST_WARPS, max(1, groups * tiles // LEAST_STEPS))
    warps = min(range(1, most + 1), key=lambda warps: _inputs_cost(groups, warps))
    own = -(-groups // warps)
    return Geometry(warps, own, tiles, tiles, 2 if own % 2 == 0 and 2 * tiles <= MOST_STEPS else 1)


def even_tiles(out_features: int) -> int:
    """How many row tiles a stream has when all processors get the same."""
    row_tiles = -(-out_features // ROWS)
    return min(range(1, MOST_TILES + 1), key=lambda tiles: (_rounds(row_tiles, tiles) * tiles, -tiles))


def _inputs_cost(groups: int, warps: int) -> tuple[float, int]:
    padded = -(-groups // warps) * warps / groups
    return padded * (1 + 0.02 * (MOST_WARPS - warps)), -warps


def _rounds(row_tiles: int, tiles: int) -> int:
    return -(-row_tiles // (tiles * PROCESSORS))


def read(numbers: Sequence[int]) -> Geometry:
    """`Geometry.numbers` backwards."""
    warps, groups, tiles, together, unroll = numbers
    return Geometry(warps, groups, tiles, together, unroll)
