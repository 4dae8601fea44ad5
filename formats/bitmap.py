"""Sparse weights as a bitmap and the values in the order of the rows: plain, and the smallest for any pattern.

| tensor | dtype, shape | what |
|---|---|---|
| `weight_bitmap` | uint8 [out, ⌈in / 8⌉] | which weights are stored: bit c mod 8 of byte ⌊c / 8⌋ for column c |
| `weight_values` | value dtype [stored] | their values, row by row |
| `weight_row_offsets` | int64 [out + 1] | where each row's begin |
| `weight_shape` | int64 [2] | out, in |
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from .errors import InputError
from .layout import Expected, Layout, check_read, check_shape, held_to, stored_scale_dtype
from .pruned import Pruned, bits_of
from .ragged import checked_offsets, offsets_of
from .scheme import Scheme
from .sparsity import Sparsity


class Bitmap:
    """The packing of `Pruned` weights by flag."""

    name = "compress-bitmap"

    def layout(self, scheme: Scheme, out_features: int, in_features: int, scale_dtype: torch.dtype) -> Layout:
        """Suffix -> dtype and shape; the number of values is what to expect."""
        stored = expected(scheme, out_features, in_features)
        return {
            **mask_layout(out_features, in_features),
            "weight_values": (scale_dtype, (Expected(stored),)),
            "weight_shape": (torch.int64, (2,)),
        }

    def pack(self, rounded: Pruned) -> dict[str, Tensor]:
        """The tensors of `layout`, contiguous, on the device of the weight."""
        bits, dtype = bits_of(rounded.weight), rounded.weight.dtype
        mask = bits != 0
        tensors = {
            **pack_mask(mask),
            "weight_values": bits[mask].view(dtype),
            "weight_shape": torch.tensor(rounded.shape, dtype=torch.int64, device=bits.device),
        }
        return held_to(tensors, self.layout(rounded.scheme, *rounded.shape, dtype))

    def check_contents(self, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> None:
        """Raise InputError where shape, bitmap, offsets and the number of values disagree."""
        del scheme
        check_shape(tensors, shape)
        check_mask(tensors, shape, "weight_values")

    def unpack(self, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> Pruned:
        """The weight that `pack` was given. `tensors` holds the suffixes of `layout` and no others.

        Raises InputError naming the suffix that is missing, unexpected, or of another dtype, shape or content.
        """
        dtype = stored_scale_dtype(tensors, scheme)
        check_read(tensors, self.layout(scheme, *shape, dtype))
        self.check_contents(tensors, scheme, shape)
        mask = unpack_mask(tensors, shape)
        values = bits_of(tensors["weight_values"])
        bits = torch.zeros(shape, dtype=values.dtype, device=values.device)
        bits[mask] = values
        return Pruned(scheme, bits.view(dtype))


def expected(scheme: Scheme, out_features: int, in_features: int) -> int:
    """How many weights will be stored, about: rounding may turn more of them into zeros."""
    return round(out_features * in_features * (1 - (scheme.sparsity or Sparsity()).ratio))


def mask_layout(out_features: int, in_features: int) -> Layout:
    """The tensors of `pack_mask`."""
    return {
        "weight_bitmap": (torch.uint8, (out_features, -(-in_features // 8))),
        "weight_row_offsets": (torch.int64, (out_features + 1,)),
    }


def pack_mask(mask: Tensor) -> dict[str, Tensor]:
    """The bitmap of `mask` (bool [out, in]) and the row offsets of what it stores."""
    octets = pad(mask, (0, -mask.shape[1] % 8)).unflatten(1, (-1, 8)).to(torch.uint8)
    shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)
    bitmap = (octets << shifts).sum(-1, dtype=torch.uint8)
    return {"weight_bitmap": bitmap, "weight_row_offsets": offsets_of(mask.sum(1))}


def check_mask(tensors: Mapping[str, Tensor], shape: tuple[int, int], flat: str, per_element: int = 1) -> None:
    """Check what `pack_mask` made; `flat` names the tensor that holds what is stored, `per_element` weights an element.

    Raises InputError when the offsets do not fit `flat` or the bitmap, and for bits that stand for no column.
    """
    counts = checked_offsets(tensors, "weight_row_offsets", flat, per_element)
    bitmap, spare = tensors["weight_bitmap"], -shape[1] % 8
    beyond = spare > 0 and bool((bitmap[:, -1] >> (8 - spare)).any())
    if beyond or not torch.equal(_ones(bitmap).sum(1), counts):
        raise InputError("weight_bitmap", "and weight_row_offsets differ", "use a whole copy of the checkpoint")


def unpack_mask(tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
    """The mask that `pack_mask` was given, of tensors that passed `check_mask`."""
    bitmap = tensors["weight_bitmap"]
    shifts = torch.arange(8, dtype=torch.uint8, device=bitmap.device)
    return (bitmap.unsqueeze(-1) >> shifts & 1).flatten(1)[:, : shape[1]].bool()


def _ones(octets: Tensor) -> Tensor:
    """How many bits are set in each byte, uint8 as they are: sums of neighbours, in pairs, fours and eights."""
    pairs = octets - (octets >> 1 & 0x55)
    fours = (pairs & 0x33) + (pairs >> 2 & 0x33)
    return fours + (fours >> 4) & 0x0F
