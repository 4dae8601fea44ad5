"""Calibrated scales of inputs: the unit of a static activation, and the global scale under dynamic ones of blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats.scheme import Activation

HEADROOM = 2.0
"""Times what the calibration text showed. E4M3 scales of blocks have 15 octaves to be exact in, so room costs nothing,
while a block above the greatest scale is clipped."""


def input_scale(activation: Activation, abs_max: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The stored scale [1] for inputs of largest magnitude `abs_max` [in], None where the activation has none.

    A scale of inputs is one unit of their grid, in `dtype`. A global scale is float32, divides block scales, and is a
    power of two: products with it are exact.
    """
    if activation.calibrated is None:
        return None
    peak = abs_max.amax().float().reshape(1)
    if activation.scale_grid is None:
        return (peak / activation.grid.reach).to(dtype).clamp_(min=torch.finfo(dtype).tiny)
    whole = activation.scale_grid.highest * activation.grid.highest / (HEADROOM * peak.clamp(min=2.0**-100))
    return torch.ldexp(torch.ones_like(whole), torch.frexp(whole).exponent - 1)
