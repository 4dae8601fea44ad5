"""compressed-tensors' `mxfp4-pack-quantized`: E2M1 in blocks of 32 that share a power of two.

| tensor | dtype, shape | what |
|---|---|---|
| `weight_packed` | uint8 [out, in / 2] | bit patterns, the first of a pair in the low half |
| `weight_scale` | uint8 [out, in / 32] | E8M0: weight = code · 2^(scale - 127) |
"""

from __future__ import annotations

from .nibble_packed import NibblePacked


class Mxfp4PackQuantized(NibblePacked):
    """The packing of MXFP4 (OCP Microscaling Formats 1.0), with 16-bit inputs or its own."""

    name = "mxfp4-pack-quantized"
