"""compressed-tensors' `nvfp4-pack-quantized`: E2M1 in blocks of 16, E4M3 scales, one more scale for the whole weight.

| tensor | dtype, shape | what |
|---|---|---|
| `weight_packed` | uint8 [out, in / 2] | bit patterns, the first of a pair in the low half |
| `weight_scale` | float8_e4m3fn [out, in / 16] | weight = code · (scale / global scale), the quotient in float32 |
| `weight_global_scale` | float32 [1] | the same for the linears that engines fuse |
| `input_global_scale` | float32 [1] | for the scales of quantised inputs, which are found while running |
"""

from __future__ import annotations

from .nibble_packed import NibblePacked


class Nvfp4PackQuantized(NibblePacked):
    """The packing of NVFP4, with 16-bit inputs or its own."""

    name = "nvfp4-pack-quantized"
