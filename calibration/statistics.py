"""What a linear saw of its inputs: the only thing a calibrated method may ask for.

Accumulated in float32 or better over all calibration tokens, one batch at a time, and mergeable, so that a stream can
be split over processes. A method declares which of the fields it needs; the others stay None and cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Field = Literal["abs_max", "abs_sum", "second_moment", "sample"]
SAMPLE_ROWS = 1024
_TILE = 256


@dataclass
class Stats:
    """Input statistics of one linear.

    `tokens` is the number of rows seen; `abs_max` [in] the largest magnitude of each channel, `abs_sum` [in] the sum of
    magnitudes, `second_moment` [in, in] the sum of x xᵀ (not divided by the count), all float32 on the stream's device.
    `sample` [≤ SAMPLE_ROWS, in] is every `stride`-th row seen, as it came: no chance in it, so a repeated run keeps the
    same rows. `memo` holds what a method derived from these numbers (a factor of the second moment), so that linears
    with the same input share the work; it is emptied whenever the numbers change.
    """

    tokens: int = 0
    abs_max: Tensor | None = None
    abs_sum: Tensor | None = None
    second_moment: Tensor | None = None
    sample: Tensor | None = None
    stride: int = 1
    memo: dict[object, object] = field(default_factory=dict, repr=False, compare=False)

    def add(self, x: Tensor, wanted: Iterable[Field], keep: Tensor | None = None) -> None:
        """Take in a batch of inputs `x` [..., in]; `keep` (bool, the leading shape of x) masks padding out."""
        rows = x.reshape(-1, x.shape[-1]) if keep is None else x[keep]
        rows = rows.float()
        self.memo.clear()
        if rows.shape[0] == 0:
            return
        for name in wanted:
            if name == "second_moment":
                self.second_moment = _add_outer(self.second_moment, rows)
            elif name == "sample":
                self._record(rows)
            else:
                part = rows.abs().amax(0) if name == "abs_max" else rows.abs().sum(0)
                setattr(self, name, _join(name, getattr(self, name), part))
        self.tokens += rows.shape[0]

    def _record(self, rows: Tensor) -> None:
        """Keep the rows whose running number is a multiple of the stride; when they get too many, every other one."""
        picked = rows[-self.tokens % self.stride :: self.stride]
        kept = picked.clone() if self.sample is None else torch.cat([self.sample, picked])
        while kept.shape[0] > SAMPLE_ROWS:
            kept, self.stride = kept[::2].clone(), self.stride * 2
        self.sample = kept

    def merge(self, other: Stats) -> Stats:
        """The statistics of both sets of tokens together, as a new object."""
        merged = Stats(self.tokens + other.tokens)
        for name in ("abs_max", "abs_sum", "second_moment"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is not None or theirs is not None:  # a side that saw no token has nothing to add
                setattr(merged, name, mine if theirs is None else _join(name, mine, theirs))
        both = [part for part in (self, other) if part.sample is not None]
        if both:
            stride = max(part.stride for part in both)
            kept = torch.cat([part.sample[:: stride // part.stride] for part in both if part.sample is not None])
            while kept.shape[0] > SAMPLE_ROWS:
                kept, stride = kept[::2], stride * 2
            merged.sample, merged.stride = kept.clone(), stride
        return merged

    def rescale(self, scale: Tensor) -> None:
        """Turn these into the statistics of inputs divided by `scale` [in], in place: no new pass over the tokens."""
        self.memo.clear()
        for name in ("abs_max", "abs_sum", "sample"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, value / scale)
        if self.second_moment is not None:
            self.second_moment = self.second_moment / scale / scale.unsqueeze(1)


def _add_outer(total: Tensor | None, rows: Tensor) -> Tensor:
    """`total` + rowsᵀ rows (in place); wide inputs compute the tiles on and above the diagonal only and mirror them."""
    width = rows.shape[1]
    if total is None:
        total = rows.new_zeros(width, width)
    tile = max(_TILE, width // 8)
    for start in range(0, width, tile):
        stop = min(start + tile, width)
        total[start:stop, start:].addmm_(rows[:, start:stop].T, rows[:, start:])
        total[stop:, start:stop] = total[start:stop, stop:].T
    return total


def _join(name: str, old: Tensor | None, new: Tensor) -> Tensor:
    if old is None:
        return new
    return torch.maximum(old, new) if name == "abs_max" else old + new


def output_error(error: Tensor, second_moment: Tensor) -> float:
    """tr(E H Eᵀ): the squared output error of the weight error `error` [out, in] on the tokens of H [in, in]."""
    return float(((error @ second_moment) * error).sum(dtype=torch.float64))
