"""What packed sparse weights mean, in plain torch: the truth that every sparse kernel is measured against.

Written from the layouts on disk (docs/formats), without the unpacking code of `formats`: each checks the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats.scheme import Scheme

TILE_ROWS, TILE_COLUMNS = 64, 128
_HALVES = {2: torch.int16, 4: torch.int32}
Rows = Callable[[Mapping[str, Tensor], tuple[int, int], slice], Tensor]
"""(tensors by suffix, (out, in), rows) to those rows of the weight, [rows, in] in the dtype they are stored in."""


@dataclass(frozen=True)
class SparseReference:
    """How one packing of weights that are not rounded is decoded, and the suffixes of the tensors that it needs."""

    rows: Rows
    suffixes: tuple[str, ...]


def three_layer_rows(tensors: Mapping[str, Tensor], shape: tuple[int, int], rows: slice) -> Tensor:
    """`compress-three-layer`."""
    out_features, in_features = shape
    first, last = rows.start // TILE_ROWS, -(-rows.stop // TILE_ROWS)
    low, high = first * TILE_ROWS, min(last * TILE_ROWS, out_features)
    stored = tensors["weight_values"]
    kept = stored[low:high].contiguous().view(_HALVES[stored.dtype.itemsize]).clone()
    moved = torch.zeros_like(kept)
    source, target = _moves(tensors, kept.shape[1], -(-in_features // TILE_COLUMNS), first, last)
    moved.view(-1)[target] = kept.view(-1)[source]
    kept.view(-1)[source] = 0

    octets = tensors["weight_positions"][low:high]
    pairs = torch.stack((octets & 15, octets >> 4), dim=2).flatten(1)[:, : kept.shape[1] // 2].to(torch.int64)
    one, two = pairs & 3, pairs >> 2
    three = torch.where(one > 0, 0, torch.where(two > 1, 1, 2))  # the least position that is neither
    four = 6 - one - two - three
    start = torch.arange(0, 2 * kept.shape[1], 4, device=kept.device)
    dense = kept.new_zeros(high - low, 2 * kept.shape[1])
    for place, values in ((one, kept[:, 0::2]), (two, kept[:, 1::2]), (three, moved[:, 0::2]), (four, moved[:, 1::2])):
        dense.scatter_(1, start + place, values)
    weight = torch.zeros_like(dense[:, :in_features])
    weight[:, tensors["weight_permutation"].long()] = dense[:, :in_features]

    begin, end = (int(tensors["weight_residual_offsets"][edge]) for edge in (low, high))
    row = torch.searchsorted(
        tensors["weight_residual_offsets"][low : high + 1].contiguous(),
        torch.arange(begin, end, device=kept.device),
        right=True,
    )
    rest = tensors["weight_residual"][begin:end].contiguous().view(kept.dtype)
    weight[row - 1, tensors["weight_residual_columns"][begin:end].long()] = rest
    return weight[rows.start - low : rows.stop - low].view(stored.dtype)


def _moves(tensors: Mapping[str, Tensor], slots: int, across: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Where values lie and where they belong, for tile rows `first` to `last`, as places in rows of `slots` slots."""
    offsets = tensors["weight_step_offsets"][first * across : last * across + 1]
    begin, end = int(offsets[0]), int(offsets[-1])
    octets = tensors["weight_steps"][begin:end].to(torch.int64)
    tile = torch.searchsorted(offsets.contiguous(), torch.arange(begin, end, device=octets.device), right=True) - 1
    column = tile % across
    wide = (slots - TILE_COLUMNS // 2 * column).clamp_(max=TILE_COLUMNS // 2)  # slots of a row of the tile
    skip = octets == 0
    places = []
    for step in (octets & 15, octets >> 4):
        run = torch.cumsum(torch.where(skip, 15, step), 0)
        base = torch.cat((run.new_zeros(1), run))[offsets[:-1] - begin]
        slot = run - base[tile] - 1
        row = tile // across * TILE_ROWS + torch.div(slot, wide, rounding_mode="floor")
        places.append(row * slots + TILE_COLUMNS // 2 * column + slot % wide)
    real = (octets & 15 != 0) & (octets >> 4 != 0)
    return places[0][real], places[1][real]


def bitmap_rows(tensors: Mapping[str, Tensor], shape: tuple[int, int], rows: slice) -> Tensor:
    """`compress-bitmap`."""
    mask, span = _stored(tensors, shape[1], rows)
    values = tensors["weight_values"][span]
    return values.new_zeros(mask.shape).masked_scatter_(mask, values)


def bitmap_codes(
    tensors: Mapping[str, Tensor], scheme: Scheme, in_features: int, rows: slice
) -> tuple[Tensor, Tensor | None]:
    """Codes of `compress-bitmap-codes` in int32, as `reference.Decode`; there are no zero points."""
    mask, span = _stored(tensors, in_features, rows)
    bits = scheme.grid.bits
    place = torch.arange(span.start, span.stop, device=mask.device) * bits
    octets = tensors["weight_packed"][torch.div(place, 8, rounding_mode="floor")].to(torch.int32)
    codes = (octets >> (place % 8).to(torch.int32)) & ((1 << bits) - 1)
    signed = codes - (1 << (bits - 1))
    return signed.new_zeros(mask.shape).masked_scatter_(mask, signed), None


def _stored(tensors: Mapping[str, Tensor], in_features: int, rows: slice) -> tuple[Tensor, slice]:
    """Which weights of `rows` are stored, bool [rows, in], and where in the order of all that are."""
    octets = tensors["weight_bitmap"][rows]
    column = torch.arange(in_features, device=octets.device)
    mask = (octets[:, column // 8] >> (column % 8).to(torch.uint8)) & 1
    ends = tensors["weight_row_offsets"]
    return mask.to(torch.bool), slice(int(ends[rows.start]), int(ends[rows.stop]))


SPARSE: dict[str, SparseReference] = {
    "compress-three-layer": SparseReference(
        three_layer_rows,
        (
            "weight_permutation",
            "weight_values",
            "weight_positions",
            "weight_steps",
            "weight_step_offsets",
            "weight_residual",
            "weight_residual_columns",
            "weight_residual_offsets",
        ),
    ),
    "compress-bitmap": SparseReference(bitmap_rows, ("weight_bitmap", "weight_row_offsets", "weight_values")),
}
