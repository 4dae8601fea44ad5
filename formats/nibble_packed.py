"""What the two layouts of four-bit floating-point weights have in common: two codes a byte."""

from __future__ import annotations

import torch
from torch import Tensor

from .beside_scales import BesideScales
from .bits import pack_nibbles, unpack_nibbles


class NibblePacked(BesideScales):
    """`weight_packed` uint8 [out, in / 2] holds code 2j of a row in the low half of byte j and 2j + 1 in the high."""

    suffix = "weight_packed"
    dtype = torch.uint8
    each = 2

    def stored(self, codes: Tensor) -> Tensor:
        """Codes (int8 [out, in]), two a byte. Raises ValueError for other codes."""
        return pack_nibbles(codes)

    def codes(self, stored: Tensor) -> Tensor:
        """`stored` backwards."""
        return unpack_nibbles(stored)
