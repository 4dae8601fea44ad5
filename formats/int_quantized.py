"""compressed-tensors' `int-quantized`: plain int8 codes, for schemes that quantise the inputs too.

| tensor | dtype, shape | what |
|---|---|---|
| `weight` | int8 [out, in] | two's complement codes |
| `weight_scale` | scale dtype [out, 1], or one a block of 128 × 128 | weight = code · scale |
| `input_scale` | scale dtype [1] | static activations only: input = code · scale |
"""

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


class IntQuantized:
    """The packing of INT8 weights with one scale a row or block, for inputs whose scales are dynamic or stored."""

    name = "int-quantized"

    def layout(self, scheme: Scheme, out_features: int, in_features: int, scale_dtype: torch.dtype) -> Layout:
        """Suffix -> dtype and shape. Raises ValueError for a scheme with zero points: they have no place here."""
        if not scheme.symmetric:
            raise ValueError(f"{scheme.name} has zero points, which {self.name} does not store")
        layout: Layout = {"weight": (torch.int8, (out_features, in_features))}
        layout.update(scale_layout(scheme, out_features, in_features, scale_dtype))
        return layout

    def pack(self, rounded: Rounded) -> dict[str, Tensor]:
        """The tensors of `layout`, contiguous; they may share memory with `rounded`.

        Raises ValueError when codes or scales are not what Rounded promises.
        """
        tensors = {"weight": rounded.codes.contiguous(), **scale_tensors(rounded)}
        return held_to(tensors, self.layout(*layout_of(rounded)))

    def check_contents(self, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> None:
        """Nothing to check: every content means a weight."""

    def unpack(self, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> Rounded:
        """The weight that `pack` was given. `tensors` holds the suffixes of `layout` and no others.

        Raises InputError naming the suffix that is missing, unexpected, or of another dtype or shape.
        """
        check_read(tensors, self.layout(scheme, *shape, stored_scale_dtype(tensors, scheme)))
        params = read_scales(tensors, scheme, shape[0])
        return Rounded(scheme, tensors["weight"], params, read_input_scale(tensors, scheme))
