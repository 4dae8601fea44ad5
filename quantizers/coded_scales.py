"""Scales that are codes: the powers of two of MX formats, and E4M3 under one global scale as in NVFP4.

MX (OCP Microscaling Formats 1.0, section 6.3): the exponent of a block comes from its largest magnitude, and the rules
differ in which way it is rounded. NVFP4: a block's scale is the E4M3 number nearest to its largest magnitude over 6,
in units of the weight's global scale; four-over-six (arXiv 2512.02010) also tries to map it to 4, where the grid is
finer. Searches try every code that can win and leave the choice to a cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats.float_grids import E4M3, E8M0, FloatGrid, ScaleGrid
from ..formats.rounded import QParams
from ..formats.scheme import Scheme

EXPONENT_RULES = ("floor", "even", "ceil")
FOUR_OVER_SIX = "four-over-six"
_NEAR_EXPONENTS = (-1, 0, 1)
_NEAR_CODES = tuple(range(-14, 9))
"""Of E4M3, eight an octave. A scale so large that the largest weight gets no more than 3.5 units never beats half of it
(the grid of half the scale has all these values), which is less than eight codes up. And the smallest scale whose
clipping alone costs no more than what the middle one loses in a block of 16 is less than 14 codes down."""
_WIDE, _NARROW = 448.0, 256.0
_MOST_GLOBAL = 2.0**100


@dataclass(frozen=True)
class PowerScales:
    """Scales that are powers of two. `rule` rounds the exponent; other rules start from `even`, as other tools do."""

    scheme: Scheme
    rule: str
    most: int

    @staticmethod
    def of(scheme: Scheme, rule: str, scale_dtype: torch.dtype) -> PowerScales:
        """`most`: no code of the grid may decode to infinity in `scale_dtype`, the dtype of the weight."""
        limit = torch.finfo(scale_dtype).max / scheme.grid.highest
        return PowerScales(scheme, rule, int(torch.tensor(limit).log2().floor()))

    def first(self, low: Tensor, high: Tensor) -> QParams:
        """The scales for groups within [low, high] (float32 [rows, groups])."""
        peak = torch.maximum(high, -low)
        mantissa, exponent = torch.frexp(peak)  # mantissa in [0.5, 1)
        top, power = torch.frexp(torch.tensor(self.scheme.grid.highest))
        raised = exponent - int(power)
        if self.rule == "ceil":
            raised += mantissa > float(top)
        elif self.rule != "floor":
            raised += mantissa >= 0.875
        return self._params(raised.masked_fill_(peak == 0, -127))

    def trials(self, low: Tensor, high: Tensor) -> Iterator[QParams]:
        """Other scales that may lose less."""
        middle = self.first(low, high).scale.to(torch.int32) - 127
        for offset in _NEAR_EXPONENTS:
            if offset:
                yield self._params(middle + offset)

    def refit(self, step: Tensor, like: QParams) -> QParams:
        """The scales nearest to `step` (float32 [rows, groups])."""
        del like
        return self._params(E8M0.encode(step).to(torch.int32) - 127)

    def _params(self, exponent: Tensor) -> QParams:
        return QParams((exponent.clamp(-127, self.most) + 127).to(torch.uint8), grid=E8M0)


@dataclass(frozen=True)
class GlobalScales:
    """E4M3 scales in units of 1 / `global_scale` (float32 [1]). `scale_dtype` is what block maxima are divided in."""

    scheme: Scheme
    rule: str
    scale_dtype: torch.dtype
    global_scale: Tensor

    @staticmethod
    def of(scheme: Scheme, rule: str, scale_dtype: torch.dtype, peak: Tensor) -> GlobalScales:
        """For weights whose largest magnitude is `peak` (float32, one number).

        The plain rule uses the whole range of E4M3, as other tools do. The others leave scales room to be raised into,
        and take a power of two, under which every weight is exact in bfloat16.
        """
        plain = rule == "minmax"
        whole = ((_WIDE if plain else _NARROW) * scheme.grid.highest / peak.double()).clamp(max=_MOST_GLOBAL).float()
        whole = torch.where(peak > 0, whole, torch.ones_like(whole))
        if not plain:
            whole = torch.ldexp(torch.ones_like(whole), torch.frexp(whole).exponent - 1)
        elif scale_dtype == torch.bfloat16:  # compressed-tensors divides in the dtype of the weight
            whole = whole.bfloat16().float()
        return GlobalScales(scheme, rule, scale_dtype, whole.reshape(1))

    def first(self, low: Tensor, high: Tensor) -> QParams:
        """The scales for groups within [low, high] (float32 [rows, groups])."""
        return self._nearest(self._even(low, high))

    def trials(self, low: Tensor, high: Tensor) -> Iterator[QParams]:
        """Other scales that may lose less."""
        even = self._even(low, high)
        if self.rule == FOUR_OVER_SIX:
            yield self._nearest(even * 1.5)
            return
        middle = self._nearest(even).scale.to(torch.int16)
        for offset in _NEAR_CODES:
            if offset:
                yield self._params((middle + offset).clamp_(0, E4M3.top).to(torch.int8))

    def refit(self, step: Tensor, like: QParams) -> QParams:
        """The scales nearest to `step` (float32 [rows, groups])."""
        del like
        return self._nearest(step)

    def _even(self, low: Tensor, high: Tensor) -> Tensor:
        peak = torch.maximum(high, -low).to(self.scale_dtype)
        return (peak / self.scheme.grid.reach).float()

    def _nearest(self, step: Tensor) -> QParams:
        return self._params(E4M3.encode(step * self.global_scale))

    def _params(self, codes: Tensor) -> QParams:
        limit = torch.finfo(self.scale_dtype).max / self.scheme.grid.highest  # no code may decode to infinity
        most = E4M3.encode(self.global_scale * (limit * (1 - 2**-4)))
        return QParams(codes.clamp_(min=1).clamp_(max=most), grid=E4M3, global_scale=self.global_scale)


def own_rules(grid: ScaleGrid | None) -> tuple[str, ...]:
    """The rules for scales on `grid` that other scales do not have."""
    if grid is None:
        return ()
    return (FOUR_OVER_SIX,) if isinstance(grid, FloatGrid) else EXPONENT_RULES
