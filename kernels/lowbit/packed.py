"""Weights as checkpoints store them brought into fragment order, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...formats.scheme import Scheme
from ..reference import Codes, packed_codes
from ..registry import Pick, Problem, pick
from . import layout
from .layout import Arranged

ROWS_AT_ONCE = 1024
"""Rows brought into another layout at a time, a multiple of 128: what is made on the way stays small."""


@dataclass(frozen=True)
class Stored:
    """One packed linear: its tensors by suffix, and (out, in)."""

    tensors: Mapping[str, Tensor]
    shape: tuple[int, int]


def misfit(scheme: Scheme) -> str | None:
    """Why weights of `scheme` have no fragment order, or None where they do."""
    if scheme.grid.name not in ("int4", "int8"):
        return f"no layout for {scheme.grid.name}"
    if scheme.activation is not None:
        if scheme.group_size is not None or scheme.grid.name != "int8" or scheme.activation.grid.name != "int8":
            return "integer activations only with int8 weights and one scale a row"
        return None
    return None if layout.supported(scheme.group_size or 0) else f"no layout for groups of {scheme.group_size}"


def pick_for(
    scheme: Scheme,
    shape: tuple[int, int],
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    asked: str | None = None,
) -> Pick:
    """What runs a product with a weight (out, in) = `shape` of `scheme` on `device`, and why.

    Raises InputError where the implementation `asked` for, or named by the environment, cannot.
    """
    if (reason := misfit(scheme)) is not None:
        return Pick("reference", reason, {"cuda": reason, "triton": reason})
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    integer, group = scheme.activation is not None, scheme.group_size or 0
    return pick(Problem(device.type, capability, tokens, *shape, dtype, scheme.grid.bits, group, integer), asked)


def arranged(scheme: Scheme, linears: Sequence[Stored], dtype: torch.dtype) -> Arranged:
    """`linears`, all of `scheme` and with the same inputs, as one weight, their rows below each other.

    `dtype` is that of the activations. On a GPU the weight is there when this returns: kernels read weights before
    their predecessors in the stream have finished. Raises ValueError for linears without rows, and what `packed_codes`
    raises.
    """
    total, weight = sum(linear.shape[0] for linear in linears), None
    for start in range(0, total, ROWS_AT_ONCE):
        part = _rows(scheme, list(_pieces(scheme, linears, start, min(start + ROWS_AT_ONCE, total))), dtype)
        weight = layout.place(weight, part, start, total)
    if weight is None:
        raise ValueError("a weight without rows has no layout")
    if weight.codes.is_cuda:
        torch.cuda.synchronize(weight.codes.device)
    return weight


def _rows(scheme: Scheme, pieces: Sequence[Codes], dtype: torch.dtype) -> Arranged:
    codes = torch.cat([piece.codes.to(torch.int8) for piece in pieces])
    scale = torch.cat([piece.scale for piece in pieces])
    if scheme.activation is not None:
        return layout.arrange_narrow(codes, scale)
    zeros = [piece.zero for piece in pieces if piece.zero is not None]
    zero = torch.cat(zeros) if zeros else None
    return layout.arrange(codes, scale, zero, scheme.grid.bits, scheme.group_size or 0, dtype)


def _pieces(scheme: Scheme, linears: Sequence[Stored], start: int, stop: int) -> Iterator[Codes]:
    """Rows `start` to `stop` of the linears one below the other."""
    first = 0
    for linear in linears:
        low, high = max(start - first, 0), min(stop - first, linear.shape[0])
        if low < high:
            yield packed_codes(linear.tensors, scheme, linear.shape, low, high)
        first += linear.shape[0]
