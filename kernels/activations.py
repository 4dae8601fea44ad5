"""Inputs as the hardware sees them: rounded to codes while the model runs, and back, in plain torch.

The arithmetic is compressed-tensors', in the dtype of the inputs. Values that are codes times a scale are exact in
float32; where inputs are half-precision they are rounded to that once more.

E4M3 scales may be chosen by other rules than the largest magnitude of their group: "four-over-six" (arXiv 2512.02010)
also tries the scale under which that magnitude is the code 4, not 6, and "mse" codes around; what has the lowest
squared error is taken. Hardware does not ask where scales came from. Powers of two leave nothing to choose (KL of
bookllama-7m on development text, MXFP4, rotation and GPTQ: .115 by the largest magnitude, .118 by a search).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..formats.scheme import Activation
from .float_reference import power_below, round_e2m1, round_e4m3

TRIALS = (-2, -1, 1, 2, 3, 4, 5)
"""Codes of E4M3 that "mse" tries, counted from the one of the largest magnitude. There are eight an octave."""
FOUR = 4.0

ROUND: dict[str, Callable[[Tensor], Tensor]] = {
    "int4": torch.round,
    "int8": torch.round,
    "e2m1": round_e2m1,
    "e4m3": round_e4m3,
}


def quantize_activation(x: Tensor, activation: Activation, input_scale: Tensor | None = None) -> Tensor:
    """`x` [..., features] as an engine sees it: rounded to codes and back, in the dtype of `x`.

    See `activation_codes`. Raises ValueError where a calibrated scale is missing, or groups do not divide the features.
    """
    codes, scale = activation_codes(x, activation, input_scale)
    return codes.mul_(scale).to(x.dtype).reshape(x.shape)


def activation_codes(x: Tensor, activation: Activation, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The values of the codes of `x` [..., features], and the scales that they are in units of.

    Granularity "token" has a scale a row of features whatever the rank of `x`, [..., 1]; "tensor" has one,
    `input_scale` [1] unless it is dynamic; "group" has one for each group, and codes are [..., groups, size]. Both come
    in the dtype of `x`, in float32 where scales are codes. Raises ValueError where a calibrated scale is missing, or
    groups do not divide the features.
    """
    if activation.calibrated is not None and input_scale is None:
        raise ValueError(f"this activation needs its {activation.calibrated}")
    if activation.group_size is not None:
        if x.shape[-1] % activation.group_size:
            raise ValueError(f"groups of {activation.group_size} do not divide {x.shape[-1]} features")
        x = x.unflatten(-1, (-1, activation.group_size))
    scale = _scale(x, activation, input_scale)
    lowest, highest = activation.grid.lowest, activation.grid.highest
    return ROUND[activation.grid.name]((x / scale).clamp_(lowest, highest)), scale


def stored_input_scale(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The calibrated scale of a linear's inputs, among its tensors by suffix."""
    found = tensors.get("input_scale")
    return tensors.get("input_global_scale") if found is None else found


def _scale(x: Tensor, activation: Activation, given: Tensor | None) -> Tensor:
    if not activation.dynamic and given is not None:
        return given.to(x.dtype)
    amax = x.abs().amax() if activation.granularity == "tensor" else x.abs().amax(dim=-1, keepdim=True)
    if activation.scale_grid is None:
        scale = amax / activation.grid.reach
        return torch.where(scale == 0, torch.finfo(x.dtype).eps, scale)
    if given is None:
        return _power(amax.float(), activation.grid.highest)
    code, rule = round_e4m3((amax / activation.grid.highest).float() * given), activation.scale_rule
    others = [_stepped(code, step) for step in TRIALS] if rule == "mse" else []
    if rule == "four-over-six":
        others = [round_e4m3((amax / FOUR).float() * given)]
    scales = [_unit(other, given) for other in (code, *others)]
    return _closest(x.float(), scales, activation) if others else scales[0]


def _closest(x: Tensor, scales: Sequence[Tensor], activation: Activation) -> Tensor:
    """For each group the scale that loses least of it, of equal ones the first."""

    def error(scale: Tensor) -> Tensor:
        codes = (x / scale).clamp_(activation.grid.lowest, activation.grid.highest)
        return (ROUND[activation.grid.name](codes) * scale - x).square_().sum(-1, keepdim=True)

    best, least = scales[0], error(scales[0])
    for scale in scales[1:]:
        lost = error(scale)
        better = lost < least
        best, least = torch.where(better, scale, best), torch.where(better, lost, least)
    return best


def _stepped(code: Tensor, steps: int) -> Tensor:
    """The E4M3 numbers (float32) so many codes away; next to subnormal ones, where codes are wider, the nearest."""
    bits = code.view(torch.int32) + (steps << 20)
    return round_e4m3(bits.clamp_(min=0).view(torch.float32))


def _unit(code: Tensor, given: Tensor) -> Tensor:
    """What an E4M3 scale is worth under a global one. Zero is taken for the least that leaves no zero to divide by."""
    return torch.where(code == 0, torch.finfo(torch.float8_e4m3fn).eps, code) / given


def _power(amax: Tensor, highest: float) -> Tensor:
    """Powers of two of a block's largest magnitude, from 1.75 times a power on of the next one ("even"), or NaN."""
    below = power_below(amax)
    nearest = torch.where(amax >= 1.75 * below, 2 * below, below)
    least = 2.0**-127
    scale = (nearest / power_below(torch.tensor(highest)).item()).clamp(min=least).masked_fill(amax == 0, least)
    return scale.masked_fill(~amax.isfinite(), torch.nan)  # whose exponent means nothing
