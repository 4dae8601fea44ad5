"""The device layout of integer weights: fragment order, the only copy of a weight that a GPU holds.

The matrix units of NVIDIA GPUs take a 16 x 16 tile of A spread over 32 lanes: lane 4 r + c holds rows r and r + 8,
columns 2 c, 2 c + 1 and those plus 8. Weights are the A operand here (tokens are the N dimension), stored so that one
16-byte load of a lane *is* its share of the tile:

- a *block* is 128 rows by 128 inputs: eight 16-row tiles, each `chunks` pieces of 32 lanes x 16 bytes; pieces hold
  neighbouring inputs (64 for 4-bit codes, 32 for 8-bit), blocks of a row tile follow each other;
- a piece's four words are the lane's four registers, (row r, r + 8) x (columns, columns + 8); in each word the low half
  is the even column, the high half the odd one, and a half holds the codes of the next matrix steps, low bits first;
- with int8 activations the step is 16 x 32, words hold four neighbouring columns of one step, a piece is one step.

4-bit codes are stored plus 8 (0 … 15). Scales come in pairs (row r, r + 8), the `per_block` groups of a block side by
side: [row tiles, blocks, 8, 8, per_block, 2]; integer zeros (plus 8) as bytes low nibble row r, high nibble row r + 8;
other zeros like scales, less their own scale. Scales along no group ("channel") have one block. Rows and inputs are
padded to whole blocks with zero scales.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Arranged:
    """A weight [out_features, in_features] in fragment order.

    `codes` uint8 [row tiles, blocks, 8, chunks, 32, 16]; `scales` as above in the activations' dtype, or float32
    [out_features] where `integer`; `zeros` None, uint8 [row tiles, blocks, 8, 8, per_block] or as scales.
    `group` 32, 64, 128, or 0 for one scale a row; `integer` means int8 activations.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group: int
    out_features: int
    in_features: int
    integer: bool = False

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

    def unscaled(self) -> Arranged:
        """The same codes with every scale one."""
        return replace(self, scales=torch.ones_like(self.scales))

    def to(self, device: torch.device | str) -> Arranged:
        """The same weight on another device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device), zeros=zeros)


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


def arrange_narrow(codes: Tensor, scale: Tensor) -> Arranged:
    """Fragment order for int8 activations: `codes` int8 [out, in], `scale` one a row."""
    padded = _padded(codes)
    rows, columns = padded.shape
    tiles = padded.view(torch.uint8).view(rows // BLOCK, 8, 2, 8, columns // BLOCK, 4, 2, 4, 4)
    #                              row tile, tile, ph, r, block, step, kh, c, byte
    ordered = tiles.permute(0, 4, 1, 5, 3, 7, 6, 2, 8).reshape(rows // BLOCK, columns // BLOCK, 8, 4, 32, 16)
    return Arranged(ordered, scale.reshape(-1).float().contiguous(), None, 8, 0, codes.shape[0], codes.shape[1], True)


def place(whole: Arranged | None, part: Arranged, start: int, rows: int) -> Arranged:
    """`part`, the rows from `start` (whole 128-row tiles) of a weight with `rows` rows, written into `whole`.

    `whole` None is a new one; until every row is written the rest of it is undefined.
    """
    if whole is None:
        tiles = -(-rows // BLOCK)
        scales = rows if part.integer else tiles
        zeros = None if part.zeros is None else part.zeros.new_empty(tiles, *part.zeros.shape[1:])
        whole = replace(
            part,
            codes=part.codes.new_empty(tiles, *part.codes.shape[1:]),
            scales=part.scales.new_empty(scales, *part.scales.shape[1:]),
            zeros=zeros,
            out_features=rows,
        )
    first = start // BLOCK
    whole.codes[first : first + part.row_tiles] = part.codes
    at = start if part.integer else first
    whole.scales[at : at + part.scales.shape[0]] = part.scales
    if whole.zeros is not None and part.zeros is not None:
        whole.zeros[first : first + part.row_tiles] = part.zeros
    return whole


def restore(weight: Arranged) -> tuple[Tensor, Tensor, Tensor | None]:
    """What `arrange` was given: signed int8 codes [out, in], float32 scales and zeros [out, groups] (zeros or None)."""
    rows, columns = weight.row_tiles * BLOCK, weight.blocks * BLOCK
    shape = (slice(weight.out_features), slice(weight.in_features))
    if weight.integer:
        tiles = weight.codes.view(weight.row_tiles, weight.blocks, 8, 4, 8, 4, 2, 2, 4).permute(
            0, 2, 7, 4, 1, 3, 6, 5, 8
        )
        return tiles.reshape(rows, columns).view(torch.int8)[shape], weight.scales.view(-1, 1), None
    codes = _codes(weight.codes, weight.bits)[shape]
    groups = -(-weight.in_features // weight.group) if weight.group else 1
    scales = _unpaired(weight.scales)[: weight.out_features, :groups].float()
    if weight.zeros is None:
        return codes, scales, None
    zeros = weight.zeros
    if zeros.dtype == torch.uint8:
        zeros = torch.stack((zeros & 15, zeros >> 4), dim=-1).float() - 8
    return codes, scales, _unpaired(zeros)[: weight.out_features, :groups].float()


def dequantize(weight: Arranged, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight [out, in] that the codes stand for, in plain torch: the reference of every kernel here."""
    codes, scales, zeros = restore(weight)
    span = weight.group or weight.in_features
    values = codes.float()
    if zeros is not None:
        values -= zeros.repeat_interleave(span, dim=1)[:, : weight.in_features]
    return values.mul_(scales.repeat_interleave(span, dim=1)[:, : weight.in_features]).to(dtype)


def dequantize_rows(weight: Arranged, start: int, stop: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows `start` to `stop` of `dequantize`, from the row tiles that hold them alone."""
    first, last = start // BLOCK, -(-stop // BLOCK)
    scales = weight.scales[first * BLOCK : last * BLOCK] if weight.integer else weight.scales[first:last]
    zeros = None if weight.zeros is None else weight.zeros[first:last]
    rows = min(last * BLOCK, weight.out_features) - first * BLOCK
    tiles = replace(weight, codes=weight.codes[first:last], scales=scales, zeros=zeros, out_features=rows)
    return dequantize(tiles, dtype)[start - first * BLOCK : stop - first * BLOCK]


def _padded(codes: Tensor) -> Tensor:
    rows, columns = codes.shape
    return pad(codes, (0, -columns % BLOCK, 0, -rows % BLOCK)).contiguous()


def _fragments(codes: Tensor, bits: int) -> Tensor:
    """int8 codes to bytes [row tiles, blocks, 8, chunks, 32, 16]."""
    padded = _padded(codes)
    rows, columns = padded.shape
    raw = (padded + 8 if bits == 4 else padded).view(torch.uint8)
    steps, chunks = 16 // bits, bits // 2
    tiles = raw.view(rows // BLOCK, 8, 2, 8, columns // BLOCK, chunks, steps, 2, 4, 2)
    #                row tile, tile, ph, r, block, chunk, step, kh, c, e
    tiles = tiles.permute(0, 4, 1, 5, 3, 8, 7, 2, 9, 6)  # row tile, block, tile, chunk, r, c | kh, ph | e, step
    if bits == 4:
        tiles = tiles[..., 0::2] | tiles[..., 1::2] << 4
    return tiles.reshape(rows // BLOCK, columns // BLOCK, 8, chunks, 32, 16)


def _codes(fragments: Tensor, bits: int) -> Tensor:
    """Bytes in fragment order back to signed int8 codes of whole blocks [rows, columns]."""
    row_tiles, blocks = fragments.shape[:2]
    steps, chunks = 16 // bits, bits // 2
    tiles = fragments.view(row_tiles, blocks, 8, chunks, 8, 4, 2, 2, 2, steps * bits // 8)
    if bits == 4:
        tiles = torch.stack((tiles & 15, tiles >> 4), dim=-1).flatten(-2)
    signed = tiles.permute(0, 2, 7, 4, 1, 3, 9, 6, 5, 8).reshape(row_tiles * BLOCK, blocks * BLOCK).view(torch.int8)
    return signed - 8 if bits == 4 else signed


def _pairs(values: Tensor, blocks: int, per_block: int) -> Tensor:
    """[out, groups] to [row tiles, blocks, 8, 8, per_block, 2], zeros in the padding."""
    rows, groups = values.shape
    padded = pad(values, (0, blocks * per_block - groups, 0, -rows % BLOCK))
    return padded.view(-1, 8, 2, 8, blocks, per_block).permute(0, 4, 1, 3, 5, 2).contiguous()


def _unpaired(pairs: Tensor) -> Tensor:
    """`_pairs` back to [rows, blocks * per_block]."""
    row_tiles, blocks, _, _, per_block, _ = pairs.shape
    return pairs.permute(0, 2, 5, 3, 1, 4).reshape(row_tiles * BLOCK, blocks * per_block)
