"""compressed-tensors' `mxfp8-quantized`: E4M3 in blocks of 32 that share a power of two.

| tensor | dtype, shape | what |
|---|---|---|
| `weight` | float8_e4m3fn [out, in] | the codes |
| `weight_scale` | uint8 [out, in / 32] | E8M0: weight = code · 2^(scale - 127) |
"""

from __future__ import annotations

from .float_quantized import FloatQuantized


class Mxfp8Quantized(FloatQuantized):
    """The packing of MXFP8 (OCP Microscaling Formats 1.0), with 16-bit inputs or its own."""

    name = "mxfp8-quantized"
