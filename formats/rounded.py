"""What a rounding returns and a packing takes: codes with the scales that give them meaning.

`Rounded.dequantize` is the one definition of what codes mean; packings and kernels are checked against it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .float_grids import ScaleGrid
from .scheme import Scheme


@dataclass(frozen=True)
class QParams:
    """Scales and zero points of one weight.

    `scale` [out, groups], a row for every row of the weight also where several share theirs: positive and finite, in
    the dtype stored on disk, or codes of `grid` as it encodes them. `global_scale` float32 [1] divides all scales where
    the scheme has one. `zero` [out, groups] in grid units, integer valued int8, or None for symmetric schemes.
    """

    scale: Tensor
    zero: Tensor | None = None
    grid: ScaleGrid | None = None
    global_scale: Tensor | None = None

    @property
    def step(self) -> Tensor:
        """What one unit of the grid is worth: float32 [out, groups]."""
        scale = self.scale.float() if self.grid is None else self.grid.decode(self.scale)
        return scale if self.global_scale is None else scale / self.global_scale

    @property
    def groups(self) -> int:
        """Number of scales along the input."""
        return self.scale.shape[1]

    def rows(self, start: int, stop: int) -> QParams:
        """The parameters of rows `start` to `stop`."""
        zero = None if self.zero is None else self.zero[start:stop]
        return replace(self, scale=self.scale[start:stop], zero=zero)

    def spread(self, in_features: int) -> tuple[Tensor, Tensor | None]:
        """Step and zero as float32, repeated to one column an input: [out, in]."""
        span = in_features // self.groups
        step = self.step.repeat_interleave(span, dim=1)
        return step, None if self.zero is None else self.zero.float().repeat_interleave(span, dim=1)

    def columns(self, group: int) -> tuple[Tensor, Tensor | None]:
        """Step and zero of one group as float32 columns [out, 1]."""
        pick = slice(group, group + 1)
        return self.step[:, pick], None if self.zero is None else self.zero[:, pick].float()


@dataclass(frozen=True)
class Rounded:
    """One weight as codes.

    `codes` int8 [out, in], as the grid encodes them; `params` as in QParams; `input_scale` [1] where the activation
    has a calibrated scale, in the dtype it is stored in.
    """

    scheme: Scheme
    codes: Tensor
    params: QParams
    input_scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.codes.shape[0], self.codes.shape[1]

    def rows(self, start: int, stop: int) -> Rounded:
        """Rows `start` to `stop` of the same weight."""
        return replace(self, codes=self.codes[start:stop], params=self.params.rows(start, stop))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in] that the codes stand for: (code - zero) * step in float32, then one rounding."""
        scale, zero = self.params.spread(self.codes.shape[1])
        return decode(self.codes, self.scheme, scale, zero).to(dtype)


def encode(weight: Tensor, scheme: Scheme, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Codes (int8) nearest to `weight` (float32) under scales and zeros that broadcast to its shape."""
    x = weight / scale
    return scheme.grid.encode(x if zero is None else x.add_(zero))


def decode(codes: Tensor, scheme: Scheme, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Values (float32) of `codes` under scales and zeros that broadcast to their shape."""
    values = scheme.grid.decode(codes)
    return (values if zero is None else values.sub_(zero)).mul_(scale)


def round_to_grid(weight: Tensor, scheme: Scheme, params: QParams) -> Rounded:
    """Nearest rounding of `weight` (float32 [out, in]) under fixed `params`."""
    scale, zero = params.spread(weight.shape[1])
    return Rounded(scheme, encode(weight, scheme, scale, zero), params)


def fake_quantize(weight: Tensor, scheme: Scheme, params: QParams) -> Tensor:
    """`round_to_grid` and back: float32 [out, in], through broadcast views so that no scale is repeated in memory."""
    grouped = weight.reshape(weight.shape[0], params.groups, -1)
    return nearest(grouped, scheme, params).reshape(weight.shape)


def nearest(grouped: Tensor, scheme: Scheme, params: QParams) -> Tensor:
    """What `grouped` (float32 [out, groups, span]) is rounded to under `params`, in the same shape."""
    step = params.step.unsqueeze(-1)
    if params.zero is None:
        return scheme.grid.nearest(grouped / step).mul_(step)
    zero = params.zero.float().unsqueeze(-1)
    return scheme.grid.nearest((grouped / step).add_(zero)).sub_(zero).mul_(step)
