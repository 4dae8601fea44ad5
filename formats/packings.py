"""The table of packings: how codes, scales and zero points become the named tensors of a format on disk.

A new format is one file with the three functions below and one row here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from .errors import InputError, nearest
from .float_quantized import FloatQuantized
from .float_zero import FloatZero
from .int_quantized import IntQuantized
from .layout import Layout
from .mxfp4_pack_quantized import Mxfp4PackQuantized
from .mxfp8_quantized import Mxfp8Quantized
from .nvfp4_pack_quantized import Nvfp4PackQuantized
from .pack_quantized import PackQuantized
from .rounded import Rounded
from .scheme import Scheme


class Packing(Protocol):
    """One layout on disk. `unpack(pack(x), x.scheme, x.shape) == x` exactly, for every shape that `layout` accepts.

    Tensors are keyed by suffix: `weight_scale` of linear `a.b` is the checkpoint tensor `a.b.weight_scale`.
    """

    @property
    def name(self) -> str:
        """The format's name in `quantization_config`."""
        ...

    def layout(self, scheme: Scheme, out_features: int, in_features: int, scale_dtype: torch.dtype) -> Layout:
        """Suffix -> (dtype, shape) of what `pack` will return. Pure: the plan's exact bytes come from it.

        Raises InputError when the group size does not divide `in_features`.
        """
        ...

    def pack(self, rounded: Rounded) -> dict[str, Tensor]:
        """Suffix -> contiguous tensor, on the device of the codes. Raises ValueError for a malformed `rounded`."""
        ...

    def unpack(self, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> Rounded:
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
    )
}


def packing(scheme: Scheme) -> Packing:
    """The packing that `scheme` is stored in. Raises InputError with the nearest name for one that is not here."""
    if scheme.packing not in PACKINGS:
        raise InputError(f"packing {scheme.packing}", "no packing has this name", nearest(scheme.packing, PACKINGS))
    return PACKINGS[scheme.packing]
