"""Number grids: the sets of values that a low-bit code can stand for, in units of its scale.

Methods and packings speak to a grid and never to "INT4", so a new number format is a new grid here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Grid(Protocol):
    """A finite set of values with a code for each."""

    @property
    def name(self) -> str: ...
    @property
    def bits(self) -> int: ...
    @property
    def lowest(self) -> float: ...
    @property
    def highest(self) -> float: ...

    @property
    def reach(self) -> float:
        """The value that the largest magnitude of a group is mapped to by a symmetric min-max scale."""
        ...

    def encode(self, x: Tensor) -> Tensor:
        """Codes (int8) of the grid values nearest to `x` (float32, any shape), saturating at both ends.

        A code is the number itself for integers, and the bit pattern for floating-point formats.
        """
        ...

    def decode(self, codes: Tensor) -> Tensor:
        """Grid values (float32) of int8 `codes`."""
        ...

    def nearest(self, x: Tensor) -> Tensor:
        """`decode(encode(x))`: the grid values nearest to `x`, float32."""
        ...


@dataclass(frozen=True)
class IntGrid:
    """Signed two's complement integers of `bits` bits: -2^(b-1) … 2^(b-1)-1.

    `reach` is half the whole range (7.5 for four bits), as compressed-tensors scales: both ends are used, and the
    largest magnitude is off by at most half a step.
    """

    bits: int

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    @property
    def lowest(self) -> float:
        return float(-(1 << (self.bits - 1)))

    @property
    def highest(self) -> float:
        return float((1 << (self.bits - 1)) - 1)

    @property
    def reach(self) -> float:
        return (self.highest - self.lowest) / 2

    def encode(self, x: Tensor) -> Tensor:
        return x.round().clamp_(self.lowest, self.highest).to(torch.int8)

    def decode(self, codes: Tensor) -> Tensor:
        return codes.to(torch.float32)

    def nearest(self, x: Tensor) -> Tensor:
        return x.round().clamp_(self.lowest, self.highest)


@dataclass(frozen=True)
class Unrounded:
    """No grid: weights stay the numbers that they are, in the dtype of the model. There are no codes and no scales."""

    name: str = "float"
    bits: int = 16
    lowest: float = -math.inf
    highest: float = math.inf
    reach: float = math.inf

    def encode(self, x: Tensor) -> Tensor:
        raise ValueError("weights that are not rounded have no codes")

    def decode(self, codes: Tensor) -> Tensor:
        raise ValueError("weights that are not rounded have no codes")

    def nearest(self, x: Tensor) -> Tensor:
        """Nothing is rounded: `x` itself."""
        return x


INT4 = IntGrid(4)
INT8 = IntGrid(8)
UNROUNDED = Unrounded()
