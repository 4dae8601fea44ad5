"""compressed-tensors' `float-quantized`: plain E4M3 weights, one scale a tensor, a row, or a block of 128 × 128.

| tensor | dtype, shape | what |
|---|---|---|
| `weight` | float8_e4m3fn [out, in] | the codes |
| `weight_scale` | scale dtype [1], [out, 1] or [⌈out / 128⌉, in / 128] | weight = code · scale |
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

CODES = torch.float8_e4m3fn


class FloatQuantized:
    """The packing of FP8 weights."""

    name = "float-quantized"

    def layout(self, scheme: Scheme, out_features: int, in_features: int, scale_dtype: torch.dtype) -> Layout:
        """Suffix -> dtype and shape. Raises InputError when the group size does not divide `in_features`."""
        layout: Layout = {"weight": (CODES, (out_features, in_features))}
        layout.update(scale_layout(scheme, out_features, in_features, scale_dtype))
        return layout

    def pack(self, rounded: Rounded) -> dict[str, Tensor]:
        """The tensors of `layout`, contiguous; they may share memory with `rounded`.

        Raises ValueError when codes or scales are not what Rounded promises.
        """
        if rounded.codes.dtype != torch.int8:
            raise ValueError(f"codes must be int8, not {rounded.codes.dtype}")
        tensors = {"weight": rounded.codes.contiguous().view(CODES), **scale_tensors(rounded)}
        return held_to(tensors, self.layout(*layout_of(rounded)))

    def check_contents(self, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> None:
        """Nothing to check: every content means a weight."""

    def unpack(self, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> Rounded:
        """The weight that `pack` was given. `tensors` holds the suffixes of `layout` and no others.

        Raises InputError naming the suffix that is missing, unexpected, or of another dtype or shape.
        """
        check_read(tensors, self.layout(scheme, *shape, stored_scale_dtype(tensors, scheme)))
        codes = tensors["weight"].view(torch.int8)
        return Rounded(scheme, codes, read_scales(tensors, scheme, shape[0]), read_input_scale(tensors, scheme))
