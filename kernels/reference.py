"""What packed tensors mean, in plain torch: the truth that every kernel is measured against.

Written from the layout on disk, without the unpacking code of `formats`: each checks the other. Numbers are those of
compressed-tensors, bit for bit, in the dtype that is computed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats.errors import InputError, nearest
from ..formats.scheme import Scheme
from .float_reference import e2m1_values, scale_rows
from .sparse_reference import SPARSE, bitmap_codes

WORD_BITS = 32
Decode = Callable[[Mapping[str, Tensor], Scheme, int, slice], tuple[Tensor, Tensor | None]]
"""(tensors by suffix, scheme, inputs, rows) to signed codes, or the values of floating-point ones, [rows, inputs], and
their zero points [rows, groups]."""


@dataclass(frozen=True)
class Codes:
    """Rows of a packed weight taken apart: `codes` int32 or int8 [rows, in], signed, or float32 values of
    floating-point codes; `scale` [rows, groups] as stored, float32 where it is stored as codes; `zero` in code units,
    integer or floating point like it, or None."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None


@dataclass(frozen=True)
class Reference:
    """How one packing is decoded, and the suffixes of the tensors that it needs."""

    codes: Decode
    suffixes: Callable[[Scheme], tuple[str, ...]]


def decode_rows(
    tensors: Mapping[str, Tensor],
    scheme: Scheme,
    shape: tuple[int, int],
    start: int = 0,
    stop: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Rows `start` to `stop` of the weight (out, in) = `shape` that `tensors` (suffix -> tensor) stand for.

    [rows, in] in `dtype`: (code - zero) times scale in float32, where it is exact for half-precision scales, rounded
    once; weights that are not rounded as they are. Raises InputError for a packing without a reference and for a
    missing tensor.
    """
    if scheme.packing in SPARSE:
        _need(tensors, SPARSE[scheme.packing].suffixes, scheme)
        return SPARSE[scheme.packing].rows(tensors, shape, slice(start, shape[0] if stop is None else stop)).to(dtype)
    rows = packed_codes(tensors, scheme, shape, start, stop)
    values = rows.codes.to(torch.float32).view(*rows.scale.shape, -1)
    if rows.zero is not None:
        values = values.sub_(rows.zero.to(torch.float32).unsqueeze(-1))
    return values.mul_(rows.scale.to(torch.float32).unsqueeze(-1)).view(rows.codes.shape).to(dtype)


def packed_codes(
    tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int], start: int = 0, stop: int | None = None
) -> Codes:
    """Codes, scales and zero points of rows `start` to `stop` of the weight (out, in) = `shape`.

    Raises InputError for a packing without a reference and for a missing tensor.
    """
    if scheme.packing not in REFERENCES:
        raise InputError(f"packing {scheme.packing}", "has no reference decoder", nearest(scheme.packing, REFERENCES))
    reference = REFERENCES[scheme.packing]
    _need(tensors, reference.suffixes(scheme), scheme)
    out_features, in_features = shape
    rows = slice(start, out_features if stop is None else stop)
    codes, zero = reference.codes(tensors, scheme, in_features, rows)
    return Codes(codes, scale_rows(tensors, scheme, rows), zero)


def _need(tensors: Mapping[str, Tensor], suffixes: tuple[str, ...], scheme: Scheme) -> None:
    for suffix in suffixes:
        if suffix not in tensors:
            cause = f"is missing from a weight stored as {scheme.packing}"
            raise InputError(suffix, cause, "use a complete checkpoint")


def _unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of each row of int32 `words`, lowest bits first, stored with the offset 2^(bits-1)."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    fields = words.unsqueeze(-1).bitwise_right_shift(shifts).bitwise_and_((1 << bits) - 1)
    return fields.flatten(1)[:, :count].sub_(1 << (bits - 1))


def _packed_codes(
    tensors: Mapping[str, Tensor], scheme: Scheme, in_features: int, rows: slice
) -> tuple[Tensor, Tensor | None]:
    """`pack-quantized`: words run along the inputs; those of the zero points along the outputs, a column a group."""
    bits = scheme.grid.bits
    codes = _unpack_words(tensors["weight_packed"][rows], bits, in_features)
    if scheme.symmetric:
        return codes, None
    per_word = WORD_BITS // bits
    first = rows.start // per_word
    columns = tensors["weight_zero_point"][first : -(-rows.stop // per_word)].T
    zeros = _unpack_words(columns, bits, rows.stop - first * per_word)[:, rows.start - first * per_word :].T
    return codes, zeros


def _float_zero_codes(
    tensors: Mapping[str, Tensor], scheme: Scheme, in_features: int, rows: slice
) -> tuple[Tensor, Tensor | None]:
    """`compress-int4-float-zero`: words as in `pack-quantized`; zero points are real numbers."""
    codes = _unpack_words(tensors["weight_packed"][rows], scheme.grid.bits, in_features)
    return codes, tensors["weight_zero_point"][rows]


def _plain_codes(
    tensors: Mapping[str, Tensor], _scheme: Scheme, _in_features: int, rows: slice
) -> tuple[Tensor, Tensor | None]:
    """`int-quantized`: the codes themselves."""
    return tensors["weight"][rows], None


def _float_codes(
    tensors: Mapping[str, Tensor], _scheme: Scheme, _in_features: int, rows: slice
) -> tuple[Tensor, Tensor | None]:
    """`float-quantized` and `mxfp8-quantized`: numbers of a dtype that torch knows."""
    return tensors["weight"][rows].float(), None


def _nibble_codes(
    tensors: Mapping[str, Tensor], _scheme: Scheme, _in_features: int, rows: slice
) -> tuple[Tensor, Tensor | None]:
    """`nvfp4-pack-quantized` and `mxfp4-pack-quantized`: two E2M1 codes a byte."""
    return e2m1_values(tensors["weight_packed"][rows]), None


def _suffixes(*weight: str) -> Callable[[Scheme], tuple[str, ...]]:
    """The tensors of a layout whose codes are in those called `weight`."""

    def named(scheme: Scheme) -> tuple[str, ...]:
        names = [*weight, "weight_scale"]
        if not scheme.symmetric:
            names.append("weight_zero_point")
        if scheme.global_scale:
            names.append("weight_global_scale")
        if scheme.activation is not None and scheme.activation.calibrated is not None:
            names.append(scheme.activation.calibrated)
        return tuple(names)

    return named


REFERENCES: dict[str, Reference] = {
    "pack-quantized": Reference(_packed_codes, _suffixes("weight_packed")),
    "compress-int4-float-zero": Reference(_float_zero_codes, _suffixes("weight_packed")),
    "int-quantized": Reference(_plain_codes, _suffixes("weight")),
    "float-quantized": Reference(_float_codes, _suffixes("weight")),
    "nvfp4-pack-quantized": Reference(_nibble_codes, _suffixes("weight_packed")),
    "mxfp4-pack-quantized": Reference(_nibble_codes, _suffixes("weight_packed")),
    "mxfp8-quantized": Reference(_float_codes, _suffixes("weight")),
    "compress-bitmap-codes": Reference(bitmap_codes, _suffixes("weight_bitmap", "weight_row_offsets", "weight_packed")),
}
