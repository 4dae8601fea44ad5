"""What a linear saw of its inputs: the only thing a calibrated method may ask for.

Accumulated in float32 or better over all calibration tokens, one batch at a time, and mergeable, so that a stream can
be split over processes. A method declares which of the fields it needs; the others stay None and cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Field = Literal["abs_max", "abs_sum", "second_moment"]


@dataclass
class Stats:
    """Input statistics of one linear.

    `tokens` is the number of rows seen; `abs_max` [in] the largest magnitude of each channel, `abs_sum` [in] the sum of
    magnitudes, `second_moment` [in, in] the sum of x xᵀ (not divided by the count), all float32 on the stream's device.
    """

    tokens: int = 0
    abs_max: Tensor | None = None
    abs_sum: Tensor | None = None
    second_moment: Tensor | None = None

    def add(self, x: Tensor, wanted: Iterable[Field], keep: Tensor | None = None) -> None:
        """Take in a batch of inputs `x` [..., in]; `keep` (bool, the leading shape of x) masks padding out."""
        rows = x.reshape(-1, x.shape[-1]) if keep is None else x[keep]
        rows = rows.float()
        self.tokens += rows.shape[0]
        if rows.shape[0] == 0:
            return
        for name in wanted:
            if name == "second_moment":
                self.second_moment = self._outer(rows)
            else:
                part = rows.abs().amax(0) if name == "abs_max" else rows.abs().sum(0)
                setattr(self, name, _join(name, getattr(self, name), part))

    def _outer(self, rows: Tensor) -> Tensor:
        if self.second_moment is None:
            return rows.T @ rows
        return self.second_moment.addmm_(rows.T, rows)

    def merge(self, other: Stats) -> Stats:
        """The statistics of both sets of tokens together, as a new object."""
        merged = Stats(self.tokens + other.tokens)
        for name in ("abs_max", "abs_sum", "second_moment"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is not None and theirs is not None:
                setattr(merged, name, _join(name, mine, theirs))
        return merged


def _join(name: str, old: Tensor | None, new: Tensor) -> Tensor:
    if old is None:
        return new
    return torch.maximum(old, new) if name == "abs_max" else old + new


def output_error(error: Tensor, second_moment: Tensor) -> float:
    """tr(E H Eᵀ): the squared output error that the weight error `error` [out, in] causes on the tokens in H [in, in]."""
    return float(((error @ second_moment) * error).sum(dtype=torch.float64))
