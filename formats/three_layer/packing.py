"""Sparse weights in three layers, after arXiv 2607.08786: exact for every weight, smallest near half of it zero.

| tensor | dtype, shape | what |
|---|---|---|
| `weight_permutation` | int32 [in] | stored column j is column `weight_permutation[j]` of the weight |
| `weight_values` | value dtype [out, 2·⌈in / 4⌉] | two values of every group of four stored columns, or moved ones |
| `weight_positions` | uint8 [out, ⌈⌈in / 4⌉ / 2⌉] | their positions in the group, four bits a group |
| `weight_steps` | uint8 [steps] | where moved values lie and belong (`steps.py`), tile after tile |
| `weight_step_offsets` | int64 [tiles + 1] | where each tile's steps begin |
| `weight_residual` | value dtype [left] | values that found no empty slot in their tile, row by row |
| `weight_residual_columns` | int32 [left] | their columns in the weight |
| `weight_residual_offsets` | int64 [out + 1] | where each row's begin |
| `weight_shape` | int64 [2] | out, in |

The whole is in docs/formats/three-layer.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import comb

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..layout import Expected, Layout, check_read, check_shape, held_to, stored_scale_dtype
from ..pruned import Pruned, bits_of
from ..ragged import offsets_of
from ..scheme import Scheme
from ..sparsity import Sparsity
from . import contents, steps
from .groups import GROUP, SLOTS, Groups, join, pack_pairs, split, unpack_pairs
from .permutation import DUMMIES, best_order
from .tiles import ROWS, Grid


class ThreeLayer:
    """The packing of `Pruned` weights whose nonzeros are not rounded."""

    name = "compress-three-layer"

    def layout(self, scheme: Scheme, out_features: int, in_features: int, scale_dtype: torch.dtype) -> Layout:
        """Suffix -> dtype and shape; how many steps and residual values there are is what to expect, not a promise."""
        grid = Grid(out_features, in_features)
        moved, left = expected(scheme.sparsity or Sparsity())
        many = out_features * grid.groups
        entries, rest = Expected(round(many * moved * (1 + DUMMIES))), Expected(round(many * left))
        return {
            "weight_permutation": (torch.int32, (in_features,)),
            "weight_values": (scale_dtype, (out_features, SLOTS * grid.groups)),
            "weight_positions": (torch.uint8, (out_features, -(-grid.groups // 2))),
            "weight_steps": (torch.uint8, (entries,)),
            "weight_step_offsets": (torch.int64, (grid.tiles + 1,)),
            "weight_residual": (scale_dtype, (rest,)),
            "weight_residual_columns": (torch.int32, (rest,)),
            "weight_residual_offsets": (torch.int64, (out_features + 1,)),
            "weight_shape": (torch.int64, (2,)),
        }

    def pack(self, rounded: Pruned) -> dict[str, Tensor]:
        """The tensors of `layout`, contiguous, on the device of the weight."""
        weight, grid = rounded.weight, Grid(*rounded.shape)
        bits = bits_of(weight)
        order = best_order(bits != 0, weight.dtype.itemsize)
        padding = (0, GROUP * grid.groups - grid.in_features, 0, ROWS * grid.strips - grid.out_features)
        stored = pad(bits.index_select(1, order), padding)
        values = stored.new_empty(grid.out_features, SLOTS * grid.groups)
        pairs = torch.empty(grid.out_features, grid.groups, dtype=torch.uint8, device=bits.device)
        parts: list[_Column] = []
        for _, columns, groups, slots in grid.columns():
            part = _pack_column(stored[:, columns], grid)
            values[:, slots] = part.groups.kept[: grid.out_features].flatten(1)
            pairs[:, groups] = part.groups.pairs[: grid.out_features]
            parts.append(part)
        entries, offsets = _in_order([part.steps for part in parts], [part.counts for part in parts])
        tensors = {
            "weight_permutation": order,
            "weight_values": values.view(weight.dtype),
            "weight_positions": pack_pairs(pairs),
            "weight_steps": entries,
            "weight_step_offsets": offsets,
            **_residual(parts, bits, order, grid, weight.dtype),
            "weight_shape": torch.tensor(rounded.shape, dtype=torch.int64, device=bits.device),
        }
        return held_to(tensors, self.layout(rounded.scheme, *rounded.shape, weight.dtype))

    def check_contents(self, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> None:
        """Raise InputError for columns, positions, steps and offsets that do not lead to places in the weight."""
        del scheme
        check_shape(tensors, shape)
        contents.check(tensors, Grid(*shape))

    def unpack(self, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> Pruned:
        """The weight that `pack` was given. `tensors` holds the suffixes of `layout` and no others.

        Raises InputError naming the suffix that is missing, unexpected, or of another dtype, shape or content.
        """
        grid, dtype = Grid(*shape), stored_scale_dtype(tensors, scheme)
        check_read(tensors, self.layout(scheme, *shape, dtype))
        self.check_contents(tensors, scheme, shape)
        counts = tensors["weight_step_offsets"].diff().view(grid.strips, grid.across)
        values = pad(bits_of(tensors["weight_values"]), (0, 0, 0, ROWS * grid.strips - grid.out_features))
        pairs = unpack_pairs(tensors["weight_positions"], grid.groups)
        pairs = pad(pairs, (0, 0, 0, ROWS * grid.strips - grid.out_features), value=4)  # positions 0 and 1
        stored = values.new_empty(ROWS * grid.strips, GROUP * grid.groups)
        for number, columns, groups, slots in grid.columns():
            moves = steps.decode(_of_column(tensors, counts, number), counts[:, number].contiguous())
            stored[:, columns] = _unpack_column(values[:, slots], pairs[:, groups], moves)
        weight = stored.new_empty(shape)
        weight[:, tensors["weight_permutation"].long()] = stored[: grid.out_features, : grid.in_features]
        row = torch.repeat_interleave(tensors["weight_residual_offsets"].diff())
        weight[row, tensors["weight_residual_columns"].long()] = bits_of(tensors["weight_residual"])
        return Pruned(scheme, weight.view(dtype))


@dataclass(frozen=True)
class _Column:
    """A column of tiles packed: its groups, all rows of tiles together; steps and how many each tile has; and what is
    left over, as places in `surplus` (row, slot)."""

    groups: Groups
    steps: Tensor
    counts: Tensor
    left: tuple[Tensor, Tensor]


def _pack_column(stored: Tensor, grid: Grid) -> _Column:
    groups = split(stored)
    kept, surplus = groups.kept.flatten(1), groups.surplus.flatten(1)
    empty = kept == 0
    empty[grid.out_features :] = False
    moves, left = steps.pair(_by_tile(empty, grid), _by_tile(surplus != 0, grid))
    _by_tile(kept, grid)[moves.tile, moves.source] = _by_tile(surplus, grid)[moves.tile, moves.destination]
    entries, counts = steps.encode(moves, grid.strips)
    row, slot = left.view(kept.shape).nonzero(as_tuple=True)
    return _Column(Groups(groups.pairs, kept.view(groups.kept.shape), groups.surplus), entries, counts, (row, slot))


def _by_tile(rows: Tensor, grid: Grid) -> Tensor:
    """[64·tiles, slots of a row] as [tiles, slots], the same memory."""
    return rows.view(grid.strips, -1)


def _in_order(entries: list[Tensor], counts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Steps that come column by column of tiles, in the order of tiles; and where each tile's begin."""
    by_column = torch.stack(counts)
    offsets = offsets_of(by_column.T.flatten())
    first = offsets[:-1].view(by_column.shape[1], -1).T.flatten()
    source = by_column.flatten()
    start = source.cumsum(0) - source
    place = torch.repeat_interleave(first - start, source) + torch.arange(int(source.sum()), device=source.device)
    together = torch.cat(entries)
    return torch.empty_like(together).scatter_(0, place, together), offsets


def _residual(parts: list[_Column], bits: Tensor, order: Tensor, grid: Grid, dtype: torch.dtype) -> dict[str, Tensor]:
    """What found no slot, as compressed rows of the weight."""
    rows, columns = [], []
    for part, (_, covered, _, _) in zip(parts, grid.columns(), strict=True):
        row, slot = part.left
        group = torch.div(slot, SLOTS, rounding_mode="floor")
        place = _places(part.groups.pairs[row, group], slot % SLOTS)
        rows.append(row)
        columns.append(order[covered.start + GROUP * group + place])
    row, column = torch.cat(rows), torch.cat(columns)
    sorted_by = (row * grid.in_features + column).argsort()
    row, column = row[sorted_by], column[sorted_by]
    return {
        "weight_residual": bits[row, column.long()].view(dtype),
        "weight_residual_columns": column,
        "weight_residual_offsets": offsets_of(torch.bincount(row, minlength=grid.out_features)),
    }


def _places(pairs: Tensor, second: Tensor) -> Tensor:
    """The first or second position of the complement of each pair."""
    used = (1 << (pairs & 3).long()) | (1 << (pairs >> 2).long())
    table = torch.zeros(16, SLOTS, dtype=torch.int64)
    for mask in range(16):
        free = [place for place in range(GROUP) if not mask >> place & 1]
        table[mask] = torch.tensor(free[:SLOTS]) if len(free) >= SLOTS else 0
    return table.to(pairs.device)[used, second]


def _of_column(tensors: Mapping[str, Tensor], counts: Tensor, number: int) -> Tensor:
    """The steps of one column of tiles."""
    many = counts[:, number]
    start = tensors["weight_step_offsets"][:-1].view(counts.shape)[:, number]
    shift = torch.repeat_interleave(start - (many.cumsum(0) - many), many)
    return tensors["weight_steps"][shift + torch.arange(shift.shape[0], device=shift.device)]


def _unpack_column(values: Tensor, pairs: Tensor, moves: steps.Moves) -> Tensor:
    kept = values.contiguous()
    by_tile = kept.view(kept.shape[0] // ROWS, -1)
    surplus = torch.zeros_like(by_tile)
    surplus[moves.tile, moves.destination] = by_tile[moves.tile, moves.source]
    by_tile[moves.tile, moves.source] = 0
    return join(Groups(pairs, *(part.view(*pairs.shape, SLOTS) for part in (kept, surplus))))


def expected(sparsity: Sparsity) -> tuple[float, float]:
    """Values moved and left over for each group of four, if weights go at random within the pattern."""
    neighbours = 8 if sparsity.pattern == "4:8" else GROUP
    keep = 1 - sparsity.ratio
    surplus = empty = 0.0
    for count in range(GROUP + 1):
        if sparsity.group is None:
            share = comb(GROUP, count) * keep**count * (1 - keep) ** (GROUP - count)
        else:
            kept = neighbours - sparsity.group[0] * neighbours // sparsity.group[1]
            share = comb(kept, count) * comb(neighbours - kept, GROUP - count) / comb(neighbours, GROUP)
        surplus += share * max(count - SLOTS, 0)
        empty += share * max(SLOTS - count, 0)
    moved = min(surplus, empty)
    return moved, surplus - moved


def shares(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Of the nonzeros, the shares that were moved and that are residual; dummies in the same unit; the sparsity."""
    out_features, in_features = (int(size) for size in tensors["weight_shape"])
    entries = tensors["weight_steps"]
    moved = int(((entries & 15 != 0) & (entries >> 4 != 0)).sum())
    left = tensors["weight_residual"].numel()
    nonzero = int((bits_of(tensors["weight_values"]) != 0).sum()) + left
    unit = max(1, nonzero)
    return {
        "sparsity": 1 - nonzero / (out_features * in_features),
        "slot_filling": moved / unit,
        "residual": left / unit,
        "dummies": (entries.numel() - moved) / unit,
    }
