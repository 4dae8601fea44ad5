"""The table of packings: how codes, scales and zero points become the named tensors of a format on disk.

A new format is one file with the four functions below and one row here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from .bitmap import Bitmap
from .bitmap_codes import BitmapCodes
from .errors import InputError, nearest
from .float_quantized import FloatQuantized
from .float_zero import FloatZero
from .int_quantized import IntQuantized
from .layout import Described, Layout, check_read, stored_scale_dtype
from .mxfp4_pack_quantized import Mxfp4PackQuantized
from .mxfp8_quantized import Mxfp8Quantized
from .nvfp4_pack_quantized import Nvfp4PackQuantized
from .pack_quantized import PackQuantized
from .pruned import Packable
from .scheme import Scheme
from .three_layer.packing import ThreeLayer, shares


class Packing(Protocol):
    """One layout on disk. `unpack(pack(x), x.scheme, x.shape) == x` exactly, for every shape that `layout` accepts.

    Tensors are keyed by suffix: `weight_scale` of linear `a.b` is the checkpoint tensor `a.b.weight_scale`.
    """

    @property
    def name(self) -> str:
        """The format's name in `quantization_config`."""
        ...

    def layout(self, scheme: Scheme, out_features: int, in_features: int, scale_dtype: torch.dtype) -> Layout:
        """Suffix -> (dtype, shape) of what `pack` will return. Pure: the plan's bytes come from it, exact but for
        sizes that are `Expected`.

        Raises InputError when the group size does not divide `in_features`.
        """
        ...

    def pack(self, rounded: Any) -> dict[str, Tensor]:
        """Suffix -> contiguous tensor, on the device of what is packed: the kind of `Packable` that the scheme makes.

        Raises ValueError for a malformed `rounded`.
        """
        ...

    def check_contents(self, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> None:
        """Raise InputError naming the suffix whose content leads out of the weight or disagrees with that of another.

        For whoever does not `unpack`: cheap, without the weight, of tensors with the dtypes and shapes of `layout`.
        Codes, scales and values mean a weight whatever they are.
        """
        ...

    def unpack(self, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> Packable:
        """The weight (out, in) = `shape` that the tensors stand for.

        Raises InputError naming the suffix that is missing, unexpected, or of another dtype, shape or content.
        """
        ...


PACKINGS: dict[str, Packing] = {
    row.name: row
    for row in (
        PackQuantized(),
        IntQuantized(),
        FloatZero(),
        FloatQuantized(),
        Nvfp4PackQuantized(),
        Mxfp4PackQuantized(),
        Mxfp8Quantized(),
        ThreeLayer(),
        Bitmap(),
        BitmapCodes(),
    )
}
NOTES: dict[str, Callable[[Mapping[str, Tensor]], dict[str, float]]] = {ThreeLayer.name: shares}
"""What the report says of the tensors of a packed weight, for the formats where their bytes do not tell."""


def packing(scheme: Scheme) -> Packing:
    """The packing that `scheme` is stored in. Raises InputError with the nearest name for one that is not here."""
    if scheme.packing not in PACKINGS:
        raise InputError(f"packing {scheme.packing}", "no packing has this name", nearest(scheme.packing, PACKINGS))
    return PACKINGS[scheme.packing]


def stored_layout(stored: Mapping[str, Described], scheme: Scheme, shape: tuple[int, int]) -> Layout:
    """What a weight (out, in) = `shape` of `scheme` is to be stored as, numbers in the dtype that `stored` has."""
    return packing(scheme).layout(scheme, *shape, stored_scale_dtype(stored, scheme))


def check_stored(stored: Mapping[str, Described], scheme: Scheme, shape: tuple[int, int]) -> None:
    """Raise InputError naming the first suffix in `stored` that is missing, unexpected, or of another dtype or shape.

    Looks at no content, so that headers will do.
    """
    check_read(stored, stored_layout(stored, scheme, shape))
