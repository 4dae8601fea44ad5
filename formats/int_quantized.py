"""compressed-tensors' `int-quantized`: plain int8 codes, for schemes that quantise the inputs too.

| tensor | dtype, shape | what |
|---|---|---|
| `weight` | int8 [out, in] | two's complement codes |
| `weight_scale` | scale dtype [out, 1], or one a block of 128 × 128 | weight = code · scale |
| `input_scale` | scale dtype [1] | static activations only: input = code · scale |
"""

from __future__ import annotations

import torch

from .beside_scales import BesideScales
from .layout import Layout
from .scheme import Scheme


class IntQuantized(BesideScales):
    """The packing of INT8 weights with one scale a row or block, for inputs whose scales are dynamic or stored."""

    name = "int-quantized"
    dtype = torch.int8

    def layout(self, scheme: Scheme, out_features: int, in_features: int, scale_dtype: torch.dtype) -> Layout:
        """Suffix -> dtype and shape. Raises ValueError for a scheme with zero points: they have no place here."""
        if not scheme.symmetric:
            raise ValueError(f"{scheme.name} has zero points, which {self.name} does not store")
        return super().layout(scheme, out_features, in_features, scale_dtype)
