"""The device layout of low-bit weights: fragment order, the only copy of a weight that a GPU holds.

The matrix units of NVIDIA GPUs take a 16 x 16 tile of A spread over 32 lanes: lane 4 r + c holds rows r and r + 8,
columns 2 c, 2 c + 1 and those plus 8. Weights are the A operand here (tokens are the N dimension), stored so that one
16-byte load of a lane *is* its share of the tile:

- a *block* is 128 rows by 128 inputs: eight 16-row tiles, each `chunks` pieces of 32 lanes x 16 bytes; pieces hold
  neighbouring inputs (64 for 4-bit codes, 32 for 8-bit), blocks of a row tile follow each other;
- a piece's four words are the lane's four registers, (row r, r + 8) x (columns, columns + 8); in each word the low half
  is the even column, the high half the odd one, and a half holds the codes of the next matrix steps: integers low bits
  first, floating-point ones as in `floats.py`;
- with 8-bit activations the step is 16 x 32, words hold four neighbouring columns of one step, a piece is one step.

4-bit integers are stored plus 8 (0 … 15). Scales come in pairs (row r, r + 8), the `per_block` groups of a block side
by side: [row tiles, blocks, 8, 8, per_block, 2], those of floating-point codes in words as in `floats.py`; integer
zeros (plus 8) as bytes low nibble row r, high nibble row r + 8; other zeros like scales, less their own scale. Scales
along no group ("channel") have one block. Factors of whole rows, float32, are for the sums, and so are scales of whole
blocks of 8-bit codes, [row tiles, blocks]. Rows and inputs are padded to whole blocks with zeros.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import floats

BLOCK = 128
GROUPS = (32, 64, 128)
FLOAT_GROUPS = {torch.float8_e4m3fn: 16, torch.uint8: 32}
"""Inputs that share a scale, by its dtype, where codes are floating-point numbers: NVFP4's, and the MX formats'."""


@dataclass(frozen=True)
class Arranged:
    """A weight [out_features, in_features] in fragment order.

    `codes` uint8 [row tiles, blocks, 8, chunks, 32, 16]; `scales` as above in the activations' dtype, bytes where
    `floating`, float32 of blocks, or None; `zeros` None, uint8 [row tiles, blocks, 8, 8, per_block] or as scales;
    `factors` float32 [out_features] or None. `group` 16, 32, 64, 128, or 0 for one scale a row. Codes are integers, or
    E2M1 and E4M3 where `floating`; activations are 16-bit numbers, or 8-bit ones of the codes' kind where `narrow`.
    4-bit codes are integers then, and become numbers of the activations' kind: E4M3 where `floating`, int8 else.
    """

    codes: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    bits: int
    group: int
    out_features: int
    in_features: int
    floating: bool = False
    narrow: bool = False
    factors: Tensor | None = None

    @property
    def blocks(self) -> int:
        """Number of 128-input blocks of a row."""
        return self.codes.shape[1]

    @property
    def row_tiles(self) -> int:
        """Number of 128-row tiles."""
        return self.codes.shape[0]

    @property
    def per_block(self) -> int:
        """Scales a row has in one block."""
        return BLOCK // self.group if self.group else 1

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales that rows have of their own in a block of 128 rows by 128 inputs."""
        if self.scales is None or self.has_block_scales:
            return 0
        return BLOCK * self.per_block * (1 if self.floating and not self.narrow else 2)

    @property
    def has_block_scales(self) -> bool:
        """Whether a scale is for a block of 128 rows by 128 inputs, and activations have one for 128 inputs too."""
        return self.narrow and self.bits == 8 and self.group > 0

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All that the weight is made of."""
        return self.codes, self.scales, self.zeros, self.factors

    def with_tensors(self, tensors: Iterable[Tensor | None]) -> Arranged:
        """The same kind of weight made of other `tensors`, in their order."""
        codes, scales, zeros, factors = tensors
        if codes is None:
            raise ValueError("a weight has codes")
        return replace(self, codes=codes, scales=scales, zeros=zeros, factors=factors)

    def to(self, device: torch.device | str) -> Arranged:
        """The same weight on another device."""
        return self.with_tensors(None if tensor is None else tensor.to(device) for tensor in self.tensors)


def supported(group: int) -> bool:
    """Whether scales every `group` inputs (0: one a row) fit the layout; larger groups are repeated every 128."""
    return group == 0 or group in GROUPS or group % BLOCK == 0


def arrange(codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group: int, dtype: torch.dtype) -> Arranged:
    """Fragment order for 16-bit activations of `dtype`.

    `codes` int8 [out, in] signed; `scale` [out, groups]; `zero` in code units like it, integer valued int8 or floating
    point; `group` 0 for one scale a row. Runs on the tensors' device.
    """
    out_features, in_features = codes.shape
    if group > BLOCK:
        scale = scale.repeat_interleave(group // BLOCK, dim=1)
        zero = None if zero is None else zero.repeat_interleave(group // BLOCK, dim=1)
        group = BLOCK
    blocks = -(-in_features // BLOCK) if group else 1
    per_block = BLOCK // group if group else 1
    scales = _pairs(scale.to(dtype), blocks, per_block)
    zeros = None
    if zero is not None and bits == 4 and not zero.is_floating_point():
        pairs = _pairs((zero + 8).to(torch.uint8), blocks, per_block)
        zeros = (pairs[..., 0] | pairs[..., 1] << 4).contiguous()
    elif zero is not None:
        zeros = _pairs(zero.to(dtype), blocks, per_block)
    return Arranged(_fragments(codes, bits), scales, zeros, bits, group, out_features, in_features)


def arrange_floating(codes: Tensor, scale: Tensor | None, factors: Tensor | None, bits: int) -> Arranged:
    """Fragment order of E2M1 (4 bits) or E4M3 (8 bits) weights for 16-bit activations.

    `codes` uint8 [out, in], a code a byte; `scale` [out, groups] float8_e4m3fn of blocks of 16 (NVFP4), uint8 of blocks
    of 32 (E8M0), or None; `factors` what rows are times beside that: float32, a number, [1] or [out], or None for one.
    """
    out_features, in_features = codes.shape
    rows = torch.ones(out_features, device=codes.device) if factors is None else factors.float().expand(out_features)
    group, pairs = 0, None
    if scale is None:
        rows = rows.contiguous()
    else:
        group = FLOAT_GROUPS[scale.dtype]
        stored, left, nothing = floats.block_scales(scale, bits)
        rows = rows * left
        codes = codes.masked_fill(nothing.repeat_interleave(group, dim=1)[:, :in_features], 0)
        pairs = floats.pack_scales(_pairs(stored, -(-in_features // BLOCK), BLOCK // group))
    fragments = _fragments(codes, bits, floating=True)
    return Arranged(fragments, pairs, None, bits, group, out_features, in_features, True, factors=rows)


def arrange_narrow(codes: Tensor, scale: Tensor, group: int = 0) -> Arranged:
    """Fragment order for activations of the codes' kind, int8 or float8_e4m3fn as `codes` [out, in].

    `scale` has one number a row, or one for all; with `group` 128 it is [out, groups], alike in the rows of a tile.
    """
    padded = _padded(codes.view(torch.uint8))
    rows, columns = padded.shape
    tiles = padded.view(rows // BLOCK, 8, 2, 8, columns // BLOCK, 4, 2, 4, 4)
    #                   row tile, tile, ph, r, block, step, kh, c, byte
    ordered = tiles.permute(0, 4, 1, 5, 3, 7, 6, 2, 8).reshape(rows // BLOCK, columns // BLOCK, 8, 4, 32, 16)
    floating, shape = codes.dtype == torch.float8_e4m3fn, (codes.shape[0], codes.shape[1])
    if group:
        return Arranged(ordered, scale[::BLOCK].float().contiguous(), None, 8, group, *shape, floating, True)
    factors = scale.reshape(-1).float().expand(codes.shape[0]).contiguous()
    return Arranged(ordered, None, None, 8, 0, *shape, floating, True, factors)


def place(whole: Arranged | None, part: Arranged, start: int, rows: int) -> Arranged:
    """`part`, the rows from `start` (whole 128-row tiles) of a weight with `rows` rows, written into `whole`.

    `whole` None is a new one; until every row is written the rest of it is undefined.
    """
    tiles, first = -(-rows // BLOCK), start // BLOCK
    sizes, starts = (tiles, tiles, tiles, rows), (first, first, first, start)
    if whole is None:
        new = (None if t is None else t.new_empty(n, *t.shape[1:]) for t, n in zip(part.tensors, sizes, strict=True))
        whole = replace(part.with_tensors(new), out_features=rows)
    for target, source, at in zip(whole.tensors, part.tensors, starts, strict=True):
        if target is not None and source is not None:
            target[at : at + len(source)] = source
    return whole


def restore(weight: Arranged) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Codes [out, in] as `arrange` and its like were given them, scales and zeros float32 [out, groups] or None.

    Scales are in the unit in which codes stand for their own values, without the factors of rows.
    """
    rows, columns = weight.row_tiles * BLOCK, weight.blocks * BLOCK
    shape = (slice(weight.out_features), slice(weight.in_features))
    if weight.narrow:
        tiles = weight.codes.view(weight.row_tiles, weight.blocks, 8, 4, 8, 4, 2, 2, 4).permute(
            0, 2, 7, 4, 1, 3, 6, 5, 8
        )
        codes = tiles.reshape(rows, columns).view(torch.uint8 if weight.floating else torch.int8)[shape]
        scales = None if weight.scales is None else weight.scales.repeat_interleave(BLOCK, dim=0)[shape[0]]
        return codes, scales, None
    codes = _codes(weight.codes, weight.bits, weight.floating)[shape]
    groups = -(-weight.in_features // weight.group) if weight.group else 1
    scales = zeros = None
    if weight.scales is not None:
        stored = floats.unpack_scales(weight.scales) if weight.floating else weight.scales
        scales = _unpaired(stored)[: weight.out_features, :groups]
        scales = floats.stored_scales(scales, weight.bits) if weight.floating else scales.float()
    if weight.zeros is not None:
        zeros = weight.zeros
        if zeros.dtype == torch.uint8:
            zeros = torch.stack((zeros & 15, zeros >> 4), dim=-1).float() - 8
        zeros = _unpaired(zeros)[: weight.out_features, :groups].float()
    return codes, scales, zeros


def dequantize(weight: Arranged, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight [out, in] that the codes stand for, in plain torch: the reference of every kernel here."""
    values = unfactored(weight)
    return (values if weight.factors is None else values.mul_(weight.factors.unsqueeze(1))).to(dtype)


def unfactored(weight: Arranged) -> Tensor:
    """The weight before the factors of its rows, float32 [out, in]."""
    codes, scales, zeros = restore(weight)
    span = weight.group or weight.in_features
    values = floats.values(codes, weight.bits) if weight.floating else codes.float()
    if zeros is not None:
        values -= zeros.repeat_interleave(span, dim=1)[:, : weight.in_features]
    if scales is not None:
        values *= scales.repeat_interleave(span, dim=1)[:, : weight.in_features]
    return values


def dequantize_rows(weight: Arranged, start: int, stop: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows `start` to `stop` of `dequantize`, from the row tiles that hold them alone."""
    first, last = start // BLOCK, -(-stop // BLOCK)
    parts = [None if tensor is None else tensor[first:last] for tensor in (weight.codes, weight.scales, weight.zeros)]
    factors = None if weight.factors is None else weight.factors[first * BLOCK : last * BLOCK]
    rows = min(last * BLOCK, weight.out_features) - first * BLOCK
    tiles = replace(weight.with_tensors((*parts, factors)), out_features=rows)
    return dequantize(tiles, dtype)[start - first * BLOCK : stop - first * BLOCK]


def _padded(codes: Tensor) -> Tensor:
    rows, columns = codes.shape
    return pad(codes, (0, -columns % BLOCK, 0, -rows % BLOCK)).contiguous()


def _fragments(codes: Tensor, bits: int, floating: bool = False) -> Tensor:
    """Codes, one a byte, to bytes [row tiles, blocks, 8, chunks, 32, 16]."""
    padded = _padded(codes)
    rows, columns = padded.shape
    raw = (padded + 8 if bits == 4 and not floating else padded).view(torch.uint8)
    steps, chunks = 16 // bits, bits // 2
    tiles = raw.view(rows // BLOCK, 8, 2, 8, columns // BLOCK, chunks, steps, 2, 4, 2)
    #                row tile, tile, ph, r, block, chunk, step, kh, c, e
    tiles = tiles.permute(0, 4, 1, 5, 3, 8, 7, 2, 9, 6)  # row tile, block, tile, chunk, r, c | kh, ph | e, step
    if floating:
        tiles = floats.pack_words(tiles, bits)
    elif bits == 4:
        tiles = tiles[..., 0::2] | tiles[..., 1::2] << 4
    return tiles.reshape(rows // BLOCK, columns // BLOCK, 8, chunks, 32, 16)


def _codes(fragments: Tensor, bits: int, floating: bool) -> Tensor:
    """Bytes in fragment order back to codes of whole blocks [rows, columns]: int8, or uint8 where floating."""
    row_tiles, blocks = fragments.shape[:2]
    steps, chunks = 16 // bits, bits // 2
    tiles = fragments.view(row_tiles, blocks, 8, chunks, 8, 4, 2, 2, 4)
    if floating:
        tiles = floats.unpack_words(tiles, bits)
    else:
        tiles = tiles.view(row_tiles, blocks, 8, chunks, 8, 4, 2, 2, 2, steps * bits // 8)
        if bits == 4:
            tiles = torch.stack((tiles & 15, tiles >> 4), dim=-1).flatten(-2)
    codes = tiles.permute(0, 2, 7, 4, 1, 3, 9, 6, 5, 8).reshape(row_tiles * BLOCK, blocks * BLOCK)
    if floating:
        return codes
    return codes.view(torch.int8) - 8 if bits == 4 else codes.view(torch.int8)


def _pairs(values: Tensor, blocks: int, per_block: int) -> Tensor:
    """[out, groups] to [row tiles, blocks, 8, 8, per_block, 2], zeros in the padding."""
    rows, groups = values.shape
    padded = pad(values, (0, blocks * per_block - groups, 0, -rows % BLOCK))
    return padded.view(-1, 8, 2, 8, blocks, per_block).permute(0, 4, 1, 3, 5, 2).contiguous()


def _unpaired(pairs: Tensor) -> Tensor:
    """`_pairs` back to [rows, blocks * per_block]."""
    row_tiles, blocks, _, _, per_block, _ = pairs.shape
    return pairs.permute(0, 2, 5, 3, 1, 4).reshape(row_tiles * BLOCK, blocks * per_block)
