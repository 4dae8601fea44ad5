"""What a rounding returns and a packing takes: codes with the scales that give them meaning.

`Rounded.dequantize` is the one definition of what codes mean; packings and kernels are checked against it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .scheme import Scheme


@dataclass(frozen=True)
class QParams:
    """Scales and zero points of one weight.

    `scale` [out, groups] in the dtype stored on disk, positive and finite; `zero` [out, groups] in grid units, integer
    valued int8, or None for symmetric schemes.
    """

    scale: Tensor
    zero: Tensor | None = None

    def spread(self, in_features: int) -> tuple[Tensor, Tensor | None]:
        """Scale and zero as float32, repeated to one column an input: [out, in]."""
        span = in_features // self.scale.shape[1]
        scale = self.scale.float().repeat_interleave(span, dim=1)
        return scale, None if self.zero is None else self.zero.float().repeat_interleave(span, dim=1)

    def columns(self, group: int) -> tuple[Tensor, Tensor | None]:
        """Scale and zero of one group as float32 columns [out, 1]."""
        pick = slice(group, group + 1)
        return self.scale[:, pick].float(), None if self.zero is None else self.zero[:, pick].float()


@dataclass(frozen=True)
class Rounded:
    """One weight as codes.

    `codes` int8 [out, in]; `params` as in QParams; `input_scale` [1] for static activation schemes, in the dtype of the
    weight's scales, as it is stored.
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
        zero = None if self.params.zero is None else self.params.zero[start:stop]
        return replace(self, codes=self.codes[start:stop], params=QParams(self.params.scale[start:stop], zero))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in] that the codes stand for: (code - zero) * scale, exact in float32, then one rounding."""
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
    grouped = weight.reshape(weight.shape[0], params.scale.shape[1], -1)
    scale = params.scale.float().unsqueeze(-1)
    zero = None if params.zero is None else params.zero.float().unsqueeze(-1)
    return decode(encode(grouped, scheme, scale, zero), scheme, scale, zero).reshape(weight.shape)
