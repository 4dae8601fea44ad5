"""compressed-tensors' `pack-quantized`: integer codes packed densely into 32-bit words.

| tensor | dtype, shape | what |
|---|---|---|
| `weight_packed` | int32 [out, ceil(in·bits/32)] | codes along the inputs, lowest bits first, offset 2^(bits-1) |
| `weight_scale` | scale dtype [out, groups] | weight = (code - zero) · scale |
| `weight_zero_point` | int32 [ceil(out·bits/32), groups] | if asymmetric: as the codes, but packed along the outputs |
| `weight_shape` | int64 [2] | out, in: the words do not tell how many codes the last one holds |
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .bits import pack_rows, unpack_rows, words
from .layout import (
    Layout,
    check_read,
    check_shape,
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


class PackQuantized:
    """The packing of INT4 and INT8 weights, symmetric and asymmetric, alone or with inputs of another kind.

    How zero points are stored is in three methods of their own: a relative of this layout differs there only.
    """

    name = "pack-quantized"

    def layout(self, scheme: Scheme, out_features: int, in_features: int, scale_dtype: torch.dtype) -> Layout:
        """Suffix -> dtype and shape. Raises InputError when the group size does not divide `in_features`."""
        bits = scheme.grid.bits
        layout: Layout = {"weight_packed": (torch.int32, (out_features, words(in_features, bits)))}
        layout.update(scale_layout(scheme, out_features, in_features, scale_dtype))
        if not scheme.symmetric:
            layout["weight_zero_point"] = self.zero_layout(scheme, out_features, in_features, scale_dtype)
        layout["weight_shape"] = (torch.int64, (2,))
        return layout

    def pack(self, rounded: Rounded) -> dict[str, Tensor]:
        """The tensors of `layout`, contiguous, on the device of the codes.

        Raises ValueError when codes, scales or zero points are not what Rounded promises.
        """
        bits, zero = rounded.scheme.grid.bits, rounded.params.zero
        tensors = {"weight_packed": pack_rows(rounded.codes, bits), **scale_tensors(rounded)}
        if zero is not None:
            tensors["weight_zero_point"] = self.pack_zero(zero, bits)
        tensors["weight_shape"] = torch.tensor(rounded.shape, dtype=torch.int64, device=rounded.codes.device)
        return held_to(tensors, self.layout(*layout_of(rounded)))

    def check_contents(self, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> None:
        """Raise InputError where `weight_shape` is at odds with `shape`."""
        del scheme
        check_shape(tensors, shape)

    def unpack(self, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> Rounded:
        """The weight that `pack` was given. `tensors` holds the suffixes of `layout` and no others.

        Raises InputError naming the suffix that is missing, unexpected, of another dtype or shape, or at odds with
        `shape`.
        """
        out_features, in_features = shape
        check_read(tensors, self.layout(scheme, out_features, in_features, stored_scale_dtype(tensors, scheme)))
        self.check_contents(tensors, scheme, shape)
        bits, zero = scheme.grid.bits, None
        if not scheme.symmetric:
            zero = self.unpack_zero(tensors["weight_zero_point"], bits, out_features)
        codes = unpack_rows(tensors["weight_packed"], bits, in_features)
        params = read_scales(tensors, scheme, out_features, zero)
        return Rounded(scheme, codes, params, read_input_scale(tensors, scheme))

    def zero_layout(
        self, scheme: Scheme, out_features: int, in_features: int, scale_dtype: torch.dtype
    ) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of the zero points. Raises ValueError for a scheme whose zero points are of another kind."""
        del scale_dtype
        if scheme.zero_dtype != "int":
            raise ValueError(f"{scheme.name} has real-valued zero points, which {self.name} does not store")
        return torch.int32, (words(out_features, scheme.grid.bits), scheme.groups(in_features))

    def pack_zero(self, zero: Tensor, bits: int) -> Tensor:
        """Zero points [out, groups] as they are stored."""
        return pack_rows(zero.T, bits).T.contiguous()

    def unpack_zero(self, stored: Tensor, bits: int, out_features: int) -> Tensor:
        """The inverse of `pack_zero`."""
        return unpack_rows(stored.T, bits, out_features).T.contiguous()
