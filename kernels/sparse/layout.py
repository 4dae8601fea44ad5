"""The device layout of sparse weights: a bitmap, and the values it marks in the order in which warps multiply them.

It takes 1.14 bytes a weight at 50 %, whatever the mask. A weight is cut into streams of steps (`geometry.py`); in a
step of 16 rows by 64 inputs, lane 4 r + c of a warp owns 32 weights, eight groups of four neighbouring inputs, which
are its registers of four m16n8k16 matrix operands: group 2 j + h holds row r + 8 h, inputs 32 (j / 2) + 8 c + 4 (j %
2) and the next three. The order of inputs within a step differs from the manual's, the same for weights and x, so that
a lane's share of x is two pieces of 16 bytes.

- `masks`: a word a lane and step. Weight 4 g + e of the lane is bit (4 g + e + 3) mod 32: eight times a group's mask
  can then be cut out in place, an offset into a table of eight-byte entries.
- `values`: rows of 128 bytes, two values for each of 32 columns. A lane reads a column of its own, two values a row,
  from the first row of the stream on; which column, changes by the step (`balance.py`). The first `head` chunks of 16
  rows of every stream come first, so that their place is known without a look at `starts`; then follow the other rows.
- `starts`: where these begin, in rows.
- `table`: a byte a step, and as many that mean nothing as fill the words of a block of steps (four or eight bytes). It
  holds by how many columns the lanes move on before the step, and in bit 5 whether another chunk must have arrived.

Rows, inputs and streams are padded with unmarked weights. Kernels read a little past the end of `masks`, `values` and
`table`; all three are longer for that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .balance import CHUNK, LANES, balance
from .geometry import MOST_STEPS, Geometry, geometry
from .weight import SparseWeight

CHUNK_ROWS = CHUNK // 2
RING = 4  # chunks that a warp has on the way or in use
BYTE_WAIT = 5
_AT_ONCE = 128  # streams whose values are placed at a time
_MASKS_PAST, _TABLE_PAST = MOST_STEPS * LANES, 2 * (MOST_STEPS // 4)  # words that kernels read past the end


@dataclass(frozen=True)
class Bitmap(SparseWeight):
    """A sparse weight [out_features, in_features] of 16-bit numbers in the layout of the kernels.

    `masks` int32 [streams * steps * 32 + …]; `values` [rows + 16, 64] in the weight's dtype; `starts` int32
    [streams + 1]; `table` int32 [streams * blocks * words + …]; `head` chunks of every stream lie at its front.
    """

    masks: Tensor
    values: Tensor
    starts: Tensor
    table: Tensor
    cut: Geometry
    head: int
    out_features: int
    in_features: int

    @property
    def streams(self) -> int:
        """Number of streams: bands of rows times `cut.warps`."""
        return self.starts.shape[0] - 1

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.values.dtype


def arrange(weight: Tensor, mask: Tensor | None = None, cut: Geometry | None = None) -> Bitmap:
    """The layout of `weight` [out, in], float16 or bfloat16, on its device.

    `mask` bool [out, in] marks what is kept; None marks everything that is not +0, so that `dense` gives the same bits.
    On a GPU the weight is there when this returns: kernels read it before their predecessors have finished. Raises
    ValueError for numbers of another width, a mask of another shape and a cut that does not cover the inputs.
    """
    check(weight)
    if mask is not None and mask.shape != weight.shape:
        raise ValueError(f"a mask of shape {tuple(mask.shape)} for a weight of shape {tuple(weight.shape)}")
    cut = cut or geometry(*weight.shape)
    if cut.inputs < weight.shape[1] or not cut.valid:
        raise ValueError(f"{cut} does not cover {weight.shape[1]} inputs")
    bits = weight.contiguous().view(torch.int16)
    marked = _steps(bits != 0 if mask is None else mask, cut)
    plan = balance(marked.sum(-1, dtype=torch.int32))
    spare = ~marked
    marked |= spare & (spare.cumsum(-1, dtype=torch.int8) <= plan.zeros[..., None])
    if mask is not None:
        bits = bits * mask
    values, starts, head = _place(marked, _steps(bits, cut), plan.rotations, plan.lengths)
    packed = Bitmap(
        masks=pad(_words(marked).flatten(), (0, _MASKS_PAST)),
        values=values.view(weight.dtype),
        starts=starts,
        table=pad(_table(plan.rotations, plan.waits, cut).flatten(), (0, _TABLE_PAST)),
        cut=cut,
        head=head,
        out_features=weight.shape[0],
        in_features=weight.shape[1],
    )
    if weight.is_cuda:
        torch.cuda.synchronize(weight.device)
    return packed


def check(weight: Tensor) -> None:
    """Raise ValueError for what is no matrix of 16-bit numbers."""
    if weight.element_size() != 2 or weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(f"a matrix of 16-bit numbers is needed, not {weight.dtype} {tuple(weight.shape)}")


def gathered(rows: Iterable[Tensor], shape: tuple[int, int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """The weight (out, in) = `shape` that comes as `rows`, some at a time from the first on, dense on `device`.

    Raises ValueError where the rows are not as many as `shape` says.
    """
    weight, first = torch.empty(shape, dtype=dtype, device=device), 0
    for part in rows:
        if first + part.shape[0] > shape[0]:
            raise ValueError(f"more than the {shape[0]} rows of the weight")
        weight[first : first + part.shape[0]] = part
        first += part.shape[0]
    if first < shape[0]:
        raise ValueError(f"{first} rows of the weight's {shape[0]}")
    return weight


def dense(packed: Bitmap) -> Tensor:
    """The weight [out, in], bit for bit, in plain torch: the reference of every kernel here."""
    cut, streams = packed.cut, packed.streams
    words = packed.masks[: streams * cut.steps * LANES].view(streams, cut.steps, LANES)
    shifts = (torch.arange(32, dtype=torch.int32, device=words.device) + 3) % 32
    rotations = turns(packed).cumsum(1) % LANES
    out = torch.empty(streams, cut.steps, LANES, 32, dtype=torch.int16, device=words.device)
    flat = packed.values.view(torch.int16).flatten()
    for first in range(0, streams, _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        marked = (words[part, ..., None] >> shifts) & 1 != 0
        at = _stored(_places(marked, rotations[part]), packed.starts, packed.head, first)
        out[part] = torch.where(marked, flat[torch.where(marked, at, 0)], 0)
    weight = _unsteps(out, cut)[: packed.out_features, : packed.in_features]
    return weight.contiguous().view(packed.values.dtype)


def turns(packed: Bitmap) -> Tensor:
    """By how many columns the lanes move on before each step: int64 [streams, steps]."""
    return _step_bytes(packed) & (LANES - 1)


def waits(packed: Bitmap) -> Tensor:
    """Whether each step waits for another chunk: int64 [streams, steps]."""
    return _step_bytes(packed) >> BYTE_WAIT


def _step_bytes(packed: Bitmap) -> Tensor:
    words = packed.table[: packed.streams * packed.cut.blocks * packed.cut.words]
    table = words.view(torch.uint8).view(packed.streams, -1)
    return table[:, packed.cut.slots()].to(torch.int64)


def _steps(weight: Tensor, cut: Geometry) -> Tensor:
    """[out, in] to [streams, steps, 32 lanes, 32], padded with zeros."""
    bands = cut.bands(weight.shape[0])
    padded = pad(weight, (0, cut.inputs - weight.shape[1], 0, bands * cut.rows - weight.shape[0]))
    tiles = padded.view(bands, cut.tiles, 2, 8, cut.warps, cut.groups, 2, 4, 2, 4)
    #                   band, tile, h, r, warp, group, half of the step, c, j % 2, e
    tiles = tiles.permute(0, 4, 1, 5, 3, 7, 6, 8, 2, 9).reshape(bands * cut.warps, cut.steps, LANES, 32)
    order = [tile * cut.groups + group for tile, group in cut.order()]
    return tiles[:, order]


def _unsteps(steps: Tensor, cut: Geometry) -> Tensor:
    """`_steps` back, padding included."""
    order = [tile * cut.groups + group for tile, group in cut.order()]
    tiles = torch.empty_like(steps)
    tiles[:, order] = steps
    bands = steps.shape[0] // cut.warps
    tiles = tiles.view(bands, cut.warps, cut.tiles, cut.groups, 8, 4, 2, 2, 2, 4)
    return tiles.permute(0, 2, 8, 4, 1, 3, 6, 5, 7, 9).reshape(bands * cut.rows, cut.inputs)


def _words(marked: Tensor) -> Tensor:
    """bool [..., 32] to int32 [...]."""
    shifts = (torch.arange(32, dtype=torch.int32, device=marked.device) + 3) % 32
    words = torch.zeros(marked.shape[:-1], dtype=torch.int32, device=marked.device)
    for i in range(32):
        words |= marked[..., i].to(torch.int32) << int(shifts[i])
    return words


def _table(rotations: Tensor, waits: Tensor, cut: Geometry) -> Tensor:
    """int32 [streams, blocks * words] of a byte a step."""
    before = pad(rotations[:, :-1], (1, 0))
    table = torch.zeros(rotations.shape[0], cut.blocks * cut.words * 4, dtype=torch.uint8, device=rotations.device)
    table[:, cut.slots()] = (rotations - before) % LANES | waits << BYTE_WAIT
    return table.view(torch.int32)


def _places(marked: Tensor, rotations: Tensor) -> Tensor:
    """Where in its stream the value of each weight is, counted in values; arbitrary where it is not `marked`.

    `marked` bool [streams, steps, 32, 32], `rotations` [streams, steps]; int64.
    """
    lanes = torch.arange(LANES, device=marked.device)
    columns = (lanes + rotations[..., None]) % LANES  # of each lane
    counts = marked.sum(-1, dtype=torch.int64)
    by_column = torch.zeros_like(counts).scatter_(-1, columns, counts)
    before = (by_column.cumsum(1) - by_column).gather(-1, columns)
    number = before[..., None] + marked.cumsum(-1) - marked.to(torch.int64)
    return (number >> 1) * (2 * LANES) + columns[..., None] * 2 + (number & 1)


def _stored(places: Tensor, starts: Tensor, head: int, first: int) -> Tensor:
    """Places in streams, from number `first` on, as indices into `values`."""
    chunk = CHUNK_ROWS * 2 * LANES
    stream = torch.arange(first, first + places.shape[0], device=places.device).view(-1, 1, 1, 1)
    beyond = (starts.shape[0] - 1) * head * chunk + starts[stream] * (2 * LANES) - head * chunk
    return torch.where(places < head * chunk, stream * (head * chunk), beyond) + places


def _place(marked: Tensor, bits: Tensor, rotations: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, int]:
    """(values int16 [rows + 16, 64], starts, head) of streams whose longest columns have `lengths` values."""
    streams = marked.shape[0]
    rows = (lengths.to(torch.int64) + 1) // 2
    head = min(RING, int(rows.min()) // CHUNK_ROWS)
    starts = torch.zeros(streams + 1, dtype=torch.int64, device=marked.device)
    starts[1:] = (rows - head * CHUNK_ROWS).cumsum(0)
    total = streams * head * CHUNK_ROWS + int(starts[-1]) + CHUNK_ROWS
    values = torch.zeros(total * 2 * LANES, dtype=torch.int16, device=marked.device)
    for first in range(0, streams, _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        at = _stored(_places(marked[part], rotations[part].to(torch.int64)), starts, head, first)
        values[at[marked[part]]] = bits[part][marked[part]]
    return values.view(total, 2 * LANES), starts.to(torch.int32), head
