"""What the layouts with one tensor of codes have in common: the scales lie beside it, and nothing else is packed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

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


class BesideScales:
    """The tensor `suffix` of `dtype` [out, in / `each`] holds the codes, `each` of them in an element."""

    name: str
    suffix: str = "weight"
    dtype: torch.dtype
    each: int = 1

    def stored(self, codes: Tensor) -> Tensor:
        """Codes (int8 [out, in]) as they are stored. Raises ValueError for another dtype that it cannot take."""
        return codes.contiguous()

    def codes(self, stored: Tensor) -> Tensor:
        """`stored` backwards."""
        return stored

    def layout(self, scheme: Scheme, out_features: int, in_features: int, scale_dtype: torch.dtype) -> Layout:
        """Suffix -> dtype and shape. Raises InputError when the group size does not divide `in_features`."""
        layout: Layout = {self.suffix: (self.dtype, (out_features, in_features // self.each))}
        layout.update(scale_layout(scheme, out_features, in_features, scale_dtype))
        return layout

    def pack(self, rounded: Rounded) -> dict[str, Tensor]:
        """The tensors of `layout`, contiguous, on the device of the codes; they may share memory with `rounded`.

        Raises ValueError when codes or scales are not what Rounded promises.
        """
        tensors = {self.suffix: self.stored(rounded.codes), **scale_tensors(rounded)}
        return held_to(tensors, self.layout(*layout_of(rounded)))

    def check_contents(self, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> None:
        """Nothing to check: every content means a weight."""

    def unpack(self, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> Rounded:
        """The weight that `pack` was given. `tensors` holds the suffixes of `layout` and no others.

        Raises InputError naming the suffix that is missing, unexpected, or of another dtype or shape.
        """
        check_read(tensors, self.layout(scheme, *shape, stored_scale_dtype(tensors, scheme)))
        params = read_scales(tensors, scheme, shape[0])
        return Rounded(scheme, self.codes(tensors[self.suffix]), params, read_input_scale(tensors, scheme))
