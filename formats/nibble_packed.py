"""What the two layouts of four-bit floating-point weights have in common: two codes a byte, scales beside them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .bits import pack_nibbles, unpack_nibbles
from .layout import (
    Layout,
    check_read,
    held_to,
    layout_of,
    read_input_scale,
    read_scales,
    scale_layout,
    scale_tensors,
    stored_scale_dtype,
)
from .rounded import Rounded
from .scheme import Scheme


class NibblePacked:
    """`weight_packed` uint8 [out, in / 2] holds code 2j of a row in the low half of byte j and 2j + 1 in the high."""

    name: str

    def layout(self, scheme: Scheme, out_features: int, in_features: int, scale_dtype: torch.dtype) -> Layout:
        """Suffix -> dtype and shape. Raises InputError when the group size does not divide `in_features`."""
        layout: Layout = {"weight_packed": (torch.uint8, (out_features, in_features // 2))}
        layout.update(scale_layout(scheme, out_features, in_features, scale_dtype))
        return layout

    def pack(self, rounded: Rounded) -> dict[str, Tensor]:
        """The tensors of `layout`, contiguous, on the device of the codes.

        Raises ValueError when codes or scales are not what Rounded promises.
        """
        tensors = {"weight_packed": pack_nibbles(rounded.codes), **scale_tensors(rounded)}
        return held_to(tensors, self.layout(*layout_of(rounded)))

    def check_contents(self, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> None:
        """Nothing to check: every content means a weight."""

    def unpack(self, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> Rounded:
        """The weight that `pack` was given. `tensors` holds the suffixes of `layout` and no others.

        Raises InputError naming the suffix that is missing, unexpected, or of another dtype or shape.
        """
        check_read(tensors, self.layout(scheme, *shape, stored_scale_dtype(tensors, scheme)))
        codes = unpack_nibbles(tensors["weight_packed"])
        return Rounded(scheme, codes, read_scales(tensors, scheme, shape[0]), read_input_scale(tensors, scheme))
