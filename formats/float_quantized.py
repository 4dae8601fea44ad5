"""compressed-tensors' `float-quantized`: plain E4M3 weights, one scale a tensor, a row, or a block of 128 × 128.

| tensor | dtype, shape | what |
|---|---|---|
| `weight` | float8_e4m3fn [out, in] | the codes |
| `weight_scale` | scale dtype [1], [out, 1] or [⌈out / 128⌉, in / 128] | weight = code · scale |
| `input_scale` | scale dtype [1] | static activations only: input = code · scale |
"""

from __future__ import annotations

import torch
from torch import Tensor

from .beside_scales import BesideScales


class FloatQuantized(BesideScales):
    """The packing of FP8 weights."""

    name = "float-quantized"
    dtype = torch.float8_e4m3fn

    def stored(self, codes: Tensor) -> Tensor:
        """Bit patterns (int8) as numbers of a dtype that torch knows. Raises ValueError for other codes."""
        if codes.dtype != torch.int8:
            raise ValueError(f"codes must be int8, not {codes.dtype}")
        return codes.contiguous().view(self.dtype)

    def codes(self, stored: Tensor) -> Tensor:
        """`stored` backwards."""
        return stored.view(torch.int8)
