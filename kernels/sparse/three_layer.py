"""The device layout of sparse weights in three layers, which three_layer.cu multiplies without taking them apart first.

It takes 1.29 bytes a weight at 50 %, more than the bitmap (layout.py), and is there for who asks for it. The layers
are those on disk (`formats/three_layer`), in the order of matrix operands and in tiles of 16 rows by 256 inputs. Inputs
go in pieces of 64 (number a), their halves (b, 0 or 1), and groups of four: row r + 8 h, inputs 16 u + 2 q (+ 0, 1, 8,
9) of the half. With 2 q + u = 4 f + t the group's place in the tile is ((2 a + b) 32 + 4 r + t) 4 + 2 f + h. So a lane
holds what the instruction wants of it, and multiplies eight neighbouring inputs of x.

- `tiles`: each 4096 bytes of slots, two a group; 512 bytes of positions, four bits a group, as the instruction wants
  them: of piece a, lane 4 r + 2 b + f, from bit 16 h + 4 t on; 128 bytes of starts; 512 bytes of steps. A lane takes up
  to 16 steps, the others are zero; its start says how many bytes of slots the steps of the lanes before pass, of the
  sources in the low half of a word, of the destinations in the high half.
- `rest`: what is left, tile by tile: values without an empty slot, and those whose steps found no room. The byte where
  the slot of the destination begins is the low half of a word, the value the high half.
- `starts`: where each tile's begin. Kernels look two tiles ahead.

A stream's tiles lie one after the other, row tiles of the same inputs side by side. Padding is zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...formats.three_layer import steps
from ...formats.three_layer.groups import split
from .geometry import INPUTS, Geometry, even_tiles
from .layout import check
from .weight import SparseWeight

PIECES = 4
"""Of 64 inputs, in a tile."""
SLOTS, STEPS, LANES = 2048, 512, 32
TILE_BYTES = 2 * SLOTS + 512 + 4 * LANES + STEPS
MOST_WARPS = 14  # for which a multiprocessor has the memory
_AT_ONCE = 1024  # tiles made or read at a time
_PAST = 2  # tiles that kernels look ahead


@dataclass(frozen=True)
class ThreeLayer(SparseWeight):
    """A sparse weight [out_features, in_features] of 16-bit numbers in three layers.

    `tiles` [tiles, 2624] in the weight's dtype, whatever the bits mean; `starts` int32 [tiles + 3]; `rest` int32
    [left]. A stream of `cut` has `cut.groups / 4` tiles along the inputs for each of its row tiles.
    """

    tiles: Tensor
    starts: Tensor
    rest: Tensor
    cut: Geometry
    out_features: int
    in_features: int

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.tiles.dtype


def geometry(out_features: int, in_features: int) -> Geometry:
    """The cut for a weight of that shape: little padding first, then many warps."""
    tiles = -(-in_features // (PIECES * INPUTS))
    most = min(MOST_WARPS, tiles)
    warps = min(range(1, most + 1), key=lambda warps: (-(-tiles // warps) * warps * (1.07 - 0.005 * warps), -warps))
    return Geometry(warps, -(-tiles // warps) * PIECES, even_tiles(out_features), 1, 1)


def arrange(weight: Tensor, cut: Geometry | None = None) -> ThreeLayer:
    """The layout of `weight` [out, in], float16 or bfloat16, on its device: everything that is not +0, whatever it is.

    On a GPU the weight is there when this returns: kernels read it before their predecessors have finished. Raises
    ValueError for numbers of another width and a cut that does not cover the inputs in whole tiles.
    """
    check(weight)
    cut = cut or geometry(*weight.shape)
    if cut.inputs < weight.shape[1] or cut.groups % PIECES:
        raise ValueError(f"{cut} does not cover {weight.shape[1]} inputs in tiles")
    bits = weight.contiguous().view(torch.int16)
    bands = max(1, _AT_ONCE // _tiles_of_a_band(cut))
    parts = [_pack(_tiles(rows, cut)) for rows in bits.split(bands * cut.rows)]
    tiles, counts, rest = (torch.cat(part) for part in zip(*parts, strict=True))
    packed = ThreeLayer(
        tiles=tiles.view(weight.dtype),
        starts=_starts(counts),
        rest=rest,
        cut=cut,
        out_features=weight.shape[0],
        in_features=weight.shape[1],
    )
    if weight.is_cuda:
        torch.cuda.synchronize(weight.device)
    return packed


def dense(packed: ThreeLayer) -> Tensor:
    """The weight [out, in], bit for bit, in plain torch: the tiles read as kernels read them."""
    cut, count = packed.cut, packed.tiles.shape[0]
    out = torch.empty(count, SLOTS // 2, 4, dtype=torch.int16, device=packed.device)
    for first in range(0, count, _AT_ONCE):
        last = min(first + _AT_ONCE, count)
        edges = packed.starts[first : last + 1].long()
        rest = packed.rest[int(edges[0]) : int(edges[-1])]
        out[first:last] = _unpack(packed.tiles[first:last].view(torch.uint8), rest, edges.diff())
    weight = _untiles(out, cut)[: packed.out_features, : packed.in_features]
    return weight.contiguous().view(packed.dtype)


def _tiles_of_a_band(cut: Geometry) -> int:
    return cut.warps * cut.groups // PIECES * cut.tiles


def _tiles(bits: Tensor, cut: Geometry) -> Tensor:
    """[out, in] to [tiles, groups in their order, 4], padded with zeros."""
    bands = cut.bands(bits.shape[0])
    padded = pad(bits, (0, cut.inputs - bits.shape[1], 0, bands * cut.rows - bits.shape[0]))
    #                  band, tile, h, r, warp, step, a, b, u, w, f, q % 2, e
    parts = padded.view(bands, cut.tiles, 2, 8, cut.warps, cut.groups // PIECES, PIECES, 2, 2, 2, 2, 2, 2)
    parts = parts.permute(0, 4, 5, 1, 6, 7, 3, 11, 8, 10, 2, 9, 12)  # t = 2 (q % 2) + u
    return parts.reshape(-1, SLOTS // 2, 4)


def _untiles(groups: Tensor, cut: Geometry) -> Tensor:
    """`_tiles` back, padding included."""
    parts = groups.view(-1, cut.warps, cut.groups // PIECES, cut.tiles, PIECES, 2, 8, 2, 2, 2, 2, 2, 2)
    return parts.permute(0, 3, 10, 6, 1, 2, 4, 5, 8, 11, 9, 7, 12).reshape(-1, cut.inputs)


def _pack(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tiles uint8 [tiles, 5248], how many values each leaves (int64), and those as words (int32): [tiles, 1024, 4]."""
    count = groups.shape[0]
    layers = split(groups.view(count, -1))
    kept, surplus = layers.kept.view(count, SLOTS), layers.surplus.view(count, SLOTS)
    moves, left = steps.pair(kept == 0, surplus != 0)
    starts, taken, fits = _deal(*steps.encode(moves, count))
    left[moves.tile[~fits], moves.destination[~fits]] = True
    tile, source, destination = moves.tile[fits], moves.source[fits], moves.destination[fits]
    kept[tile, source] = surplus[tile, destination]
    tiles = torch.cat([part.view(torch.uint8) for part in (kept, _positions(layers.pairs), starts, taken)], 1)
    tile, slot = left.nonzero(as_tuple=True)
    return tiles, left.sum(1), surplus[tile, slot].to(torch.int32) << 16 | slot.to(torch.int32) * 2


def _deal(entries: Tensor, made: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The steps of tiles, `made` each, dealt out to lanes: starts int32 [tiles, 32], steps uint8 [tiles, 512].

    All lanes get as many, so that they need the fewest rounds. Also says of each move whether there was room for it.
    """
    tile = torch.repeat_interleave(made)
    place = torch.arange(tile.shape[0], device=tile.device) - (made.cumsum(0) - made)[tile]
    each = (-(-made // LANES)).clamp(1, STEPS // LANES)[tile]
    room = place < STEPS
    lane = tile * LANES + place // each
    taken = entries.new_zeros(made.shape[0] * LANES, STEPS // LANES)
    taken[lane[room], (place % each)[room]] = entries[room]
    starts = made.new_zeros(2, made.shape[0] * LANES)
    for half, nibble in enumerate((entries & 15, entries >> 4)):
        starts[half].index_add_(0, lane[room], _advance(nibble, entries)[room])
    starts = starts.view(2, -1, LANES)
    low, high = (starts.cumsum(-1) - starts) * 2
    real = (entries & 15 != 0) & (entries >> 4 != 0)
    return (low | high << 16).to(torch.int32), taken.view(-1, STEPS), room[real]


def _positions(pairs: Tensor) -> Tensor:
    """Four bits a group, uint8 [tiles, 1024], as int32 [tiles, 128]."""
    # a, b, r, t, f, h to a, r, b, f | h, t
    ordered = pairs.view(-1, PIECES, 2, 8, 4, 2, 2).permute(0, 1, 3, 2, 5, 6, 4).reshape(pairs.shape[0], -1, 2)
    return (ordered[..., 0] | ordered[..., 1] << 4).view(torch.int32)


def _advance(nibble: Tensor, entry: Tensor) -> Tensor:
    """How far an entry moves on: 15 where both halves are zero."""
    return nibble.long().masked_fill(entry == 0, steps.REACH)


def _starts(counts: Tensor) -> Tensor:
    ends = counts.cumsum(0)
    return torch.cat([ends.new_zeros(1), ends, ends[-1:].expand(_PAST)]).to(torch.int32)


def _unpack(tiles: Tensor, rest: Tensor, counts: Tensor) -> Tensor:
    """int16 [tiles, 1024, 4] of tiles uint8 [tiles, 5248] and what `rest` holds for them, `counts` each."""
    count = tiles.shape[0]
    kept, pairs, passed, taken = tiles.split((2 * SLOTS, 512, 4 * LANES, STEPS), 1)
    kept = kept.contiguous().view(torch.int16)
    others = torch.zeros_like(kept)
    passed, taken = passed.contiguous().view(torch.int32), taken.reshape(count, LANES, -1)
    source, destination = (
        ((passed >> shift & 0xFFFF)[..., None] // 2 + _advance(taken >> half & 15, taken).cumsum(-1) - 1)
        for shift, half in ((0, 0), (16, 4))
    )
    real = (taken & 15 != 0) & (taken >> 4 != 0)
    tile = real.nonzero(as_tuple=True)[0]
    source, destination = source[real], destination[real]
    others[tile, destination] = kept[tile, source]
    kept[tile, source] = 0
    others[torch.repeat_interleave(counts), (rest & 0xFFFF).long() // 2] = (rest >> 16).to(torch.int16)
    words = pairs.contiguous().view(torch.int32)
    places = torch.cat([_places(words), _places(_complement(words))], -1)
    values = torch.stack([kept, others], 1).view(count, 2, -1, 2).transpose(1, 2).reshape(count, -1, 4)
    return torch.zeros_like(values).scatter_(-1, places, values)


def _complement(words: Tensor) -> Tensor:
    """Of every four bits that name two positions, those that name the other two."""
    crossed = (~words >> 3 | words >> 1) & 0x11111111
    return words ^ 0x55555555 ^ crossed * 15


def _places(words: Tensor) -> Tensor:
    """Positions int64 [tiles, 1024, 2] of the groups in words int32 [tiles, 128]."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    pairs = (words[..., None] >> shifts & 15).view(-1, PIECES, 8, 2, 2, 2, 4)  # a, r, b, f, h, t
    pairs = pairs.permute(0, 1, 3, 2, 6, 4, 5).reshape(words.shape[0], -1).long()
    return torch.stack([pairs & 3, pairs >> 2], -1)
