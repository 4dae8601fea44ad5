"""Floating-point number grids of eight bits and less: E2M1 and E4M3 for weights, E4M3 and E8M0 for their scales.

Codes are the bit patterns. Names and limits are those of the OCP specifications "Microscaling Formats (MX)" 1.0,
section 5.3, and "8-bit Floating Point" 1.0, section 5; E4M3 is the finite variant ("FN"): no infinity, one NaN a sign.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MANTISSA, _BIAS, _EXPONENT = 23, 127, 0x7F800000  # of float32


@dataclass(frozen=True)
class FloatGrid:
    """Sign, `exponent_bits` and `mantissa_bits`, with subnormals, without infinities.

    `top` is the code of the greatest magnitude; `nan` the code of NaN, None where the format has none. `dtype` is
    torch's name for the format, which tensors on disk have (None where several codes share a byte).

    Encoding takes the nearest value, halves to the even code, and saturates: infinities become the greatest magnitude.
    A format without NaN encodes it as its greatest value, as NVIDIA's conversions do.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    top: int
    nan: int | None = None
    dtype: torch.dtype | None = None

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def highest(self) -> float:
        exponent, fraction = divmod(self.top, 1 << self.mantissa_bits)
        return (1 + fraction / (1 << self.mantissa_bits)) * 2.0 ** (exponent - 1 + self._least)

    @property
    def lowest(self) -> float:
        return -self.highest

    @property
    def reach(self) -> float:
        """The highest value: the grid has the same on both sides."""
        return self.highest

    @property
    def _least(self) -> int:
        """The exponent of subnormals and of the smallest normal values."""
        return 2 - (1 << (self.exponent_bits - 1))

    def encode(self, x: Tensor) -> Tensor:
        """Bit patterns (int8) of the grid values nearest to `x` (float32, any shape)."""
        size = x.abs().clamp_(max=self.highest)
        power = self._power(size)
        exponent = (power.view(torch.int32) >> _MANTISSA).sub_(_BIAS + self._least)
        # A mantissa that rounds up to the next power of two carries into the exponent by itself.
        units = size.div_(power.mul_(self._unit)).round_()
        code = units.to(torch.int32).add_(exponent.bitwise_left_shift_(self.mantissa_bits))
        unknown = x.isnan()
        code.masked_fill_(unknown, self.top if self.nan is None else self.nan)
        negative = x.signbit() & ~unknown if self.nan is None else x.signbit()
        return code.add_(negative.to(torch.int32) << (self.bits - 1)).to(torch.uint8).view(torch.int8)

    def nearest(self, x: Tensor) -> Tensor:
        """The values themselves (float32): `decode(encode(x))` in less time. NaN stays NaN."""
        value = x.clamp(self.lowest, self.highest)
        step = self._power(value).mul_(self._unit)
        return value.div_(step).round_().mul_(step)

    def _power(self, x: Tensor) -> Tensor:
        """The power of two at or below each magnitude, as far down as subnormals have steps of their own."""
        least = (self._least + _BIAS) << _MANTISSA
        return (x.view(torch.int32) & _EXPONENT).clamp_(min=least).view(torch.float32)

    @property
    def _unit(self) -> float:
        """A step of the grid at magnitude 1."""
        return 2.0**-self.mantissa_bits

    def decode(self, codes: Tensor) -> Tensor:
        """Values (float32) of bit patterns (int8); bits above the format's are not looked at."""
        wide = codes.view(torch.uint8).to(torch.int32)
        size = wide & ((1 << (self.bits - 1)) - 1)
        sign = (wide >> (self.bits - 1)).bitwise_and_(1).bitwise_left_shift_(31)
        unknown = None if self.nan is None else size == self.nan
        # Read as float32, exponent field over exponent field, the value is off by the difference of the biases.
        value = size.bitwise_left_shift_(_MANTISSA - self.mantissa_bits).bitwise_or_(sign).view(torch.float32)
        value.mul_(2.0 ** (_BIAS - 1 + self._least))
        return value if unknown is None else value.masked_fill_(unknown, torch.nan)


@dataclass(frozen=True)
class PowerGrid:
    """E8M0: the powers of two from 2^-127 to 2^127, a code each, and NaN as 255. For scales, which are positive."""

    name: str = "e8m0"
    bits: int = 8
    dtype: torch.dtype = torch.uint8
    top: int = 254

    @property
    def lowest(self) -> float:
        return 2.0**-_BIAS

    @property
    def highest(self) -> float:
        return 2.0**_BIAS

    @property
    def reach(self) -> float:
        return self.highest

    def encode(self, x: Tensor) -> Tensor:
        """Codes (uint8) of the powers nearest to `x` (float32), halves to the greater; 0 and less get the least."""
        fraction, exponent = torch.frexp(x.clamp(self.lowest, self.highest))
        code = exponent + (_BIAS - 1)  # of the power below
        return code.add_(fraction >= 0.75).clamp_(0, self.top).masked_fill_(x.isnan(), 255).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Values (float32) of `codes` (uint8)."""
        field = codes.to(torch.int32) << _MANTISSA
        field.masked_fill_(codes == 0, 1 << (_MANTISSA - 1))  # 2^-127 is a subnormal of float32
        return field.view(torch.float32).masked_fill_(codes == 255, torch.nan)

    def nearest(self, x: Tensor) -> Tensor:
        """The powers themselves (float32)."""
        return self.decode(self.encode(x))


E2M1 = FloatGrid("e2m1", 2, 1, top=7)
E4M3 = FloatGrid("e4m3", 4, 3, top=126, nan=127, dtype=torch.float8_e4m3fn)
E8M0 = PowerGrid()
ScaleGrid = FloatGrid | PowerGrid
