"""Weights that are sparse and rounded: a bitmap, and the codes that are not zero in the order of the rows.

| tensor | dtype, shape | what |
|---|---|---|
| `weight_bitmap`, `weight_row_offsets` | as in `bitmap.py` | where the codes that are not zero lie |
| `weight_packed` | uint8 [⌈stored · bits / 8⌉] | those codes one after the other, low bits first, offset 2^(bits-1) |
| `weight_scale` | scale dtype [out, groups] | weight = code · scale, groups along all inputs |
| `weight_shape` | int64 [2] | out, in |

A weight that was kept and rounded to zero is not stored: it means the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .bitmap import check_mask, expected, mask_layout, pack_mask, unpack_mask
from .bits import pack_bytes, unpack_bytes
from .layout import (
    Expected,
    Layout,
    check_read,
    check_shape,
    held_to,
    layout_of,
    read_scales,
    scale_layout,
    scale_tensors,
    stored_scale_dtype,
)
from .rounded import Rounded
from .scheme import Scheme


class BitmapCodes:
    """The packing of sparse, symmetric, weight-only integer schemes."""

    name = "compress-bitmap-codes"

    def layout(self, scheme: Scheme, out_features: int, in_features: int, scale_dtype: torch.dtype) -> Layout:
        """Suffix -> dtype and shape; the number of codes is what to expect, and hardly ever more.

        Raises InputError when the group size does not divide `in_features`.
        """
        stored = expected(scheme, out_features, in_features)
        return {
            **mask_layout(out_features, in_features),
            "weight_packed": (torch.uint8, (Expected(-(-stored * scheme.grid.bits // 8)),)),
            **scale_layout(scheme, out_features, in_features, scale_dtype),
            "weight_shape": (torch.int64, (2,)),
        }

    def pack(self, rounded: Rounded) -> dict[str, Tensor]:
        """The tensors of `layout`, contiguous, on the device of the codes.

        Raises ValueError when codes, scales or zero points are not what Rounded promises.
        """
        mask = rounded.codes != 0
        tensors = {
            **pack_mask(mask),
            "weight_packed": pack_bytes(rounded.codes[mask], rounded.scheme.grid.bits),
            **scale_tensors(rounded),
            "weight_shape": torch.tensor(rounded.shape, dtype=torch.int64, device=mask.device),
        }
        return held_to(tensors, self.layout(*layout_of(rounded)))

    def check_contents(self, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> None:
        """Raise InputError where shape, bitmap, offsets and the number of codes disagree."""
        check_shape(tensors, shape)
        check_mask(tensors, shape, "weight_packed", 8 // scheme.grid.bits)

    def unpack(self, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> Rounded:
        """The weight that `pack` was given. `tensors` holds the suffixes of `layout` and no others.

        Raises InputError naming the suffix that is missing, unexpected, or of another dtype, shape or content.
        """
        check_read(tensors, self.layout(scheme, *shape, stored_scale_dtype(tensors, scheme)))
        self.check_contents(tensors, scheme, shape)
        bits = scheme.grid.bits
        mask = unpack_mask(tensors, shape)
        codes = torch.zeros(shape, dtype=torch.int8, device=mask.device)
        codes[mask] = unpack_bytes(tensors["weight_packed"], bits, int(tensors["weight_row_offsets"][-1]))
        return Rounded(scheme, codes, read_scales(tensors, scheme, shape[0]))
