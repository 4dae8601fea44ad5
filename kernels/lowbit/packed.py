"""Weights as checkpoints store them brought into fragment order, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...formats.scheme import Scheme
from ..reference import packed_codes
from ..registry import Pick, Problem, pick, reference_alone
from . import layout
from .layout import Arranged

INTEGERS, FLOATING = ("int4", "int8"), ("e2m1", "e4m3")
ROWS_AT_ONCE = 1024
"""Rows brought into another layout at a time, a multiple of 128: what is made on the way stays small."""


@dataclass(frozen=True)
class Stored:
    """One packed linear: its tensors by suffix, and (out, in)."""

    tensors: Mapping[str, Tensor]
    shape: tuple[int, int]


Piece = tuple[Stored, int, int]
"""A linear, and the first and the last of its rows (exclusive)."""


def misfit(scheme: Scheme) -> str | None:
    """Why weights of `scheme` have no fragment order, or None where they do."""
    if scheme.grid.name in INTEGERS:
        return None if layout.supported(scheme.group_size or 0) else f"no layout for groups of {scheme.group_size}"
    if scheme.grid.name not in FLOATING:
        return f"no layout for {scheme.grid.name}"
    if scheme.group_size is None or narrow(scheme):
        return None
    stored = None if scheme.scale_grid is None else scheme.scale_grid.dtype
    if stored is None or layout.FLOAT_GROUPS.get(stored) != scheme.group_size:
        return f"no layout for {scheme.grid.name} with scales of {scheme.group_size} inputs like these"
    return None


def narrow(scheme: Scheme) -> bool:
    """Whether the layout of `scheme` is for 8-bit activations of the weight's kind: one scale a row, or a block.

    Other quantised activations are rounded and multiplied as 16-bit numbers, or as 8-bit ones where the weight's layout
    does for both.
    """
    inputs = scheme.activation
    if inputs is None or inputs.grid != scheme.grid or scheme.grid.bits != 8 or scheme.scale_grid is not None:
        return False
    if scheme.group_size is None:
        return inputs.group_size is None
    return scheme.group_size == inputs.group_size == layout.BLOCK and scheme.block_rows % layout.BLOCK == 0


def microscaled(scheme: Scheme) -> bool:
    """Whether weights and activations are of one kind, with scales of groups that are codes."""
    inputs = scheme.activation
    if inputs is None or scheme.scale_grid is None:
        return False
    return (inputs.grid, inputs.group_size, inputs.scale_grid) == (scheme.grid, scheme.group_size, scheme.scale_grid)


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
        return reference_alone(reason, asked)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    kind = (scheme.grid.bits, scheme.group_size or 0, narrow(scheme), scheme.grid.name in FLOATING, microscaled(scheme))
    return pick(Problem(device.type, capability, tokens, *shape, dtype, *kind), asked)


def arranged(scheme: Scheme, linears: Sequence[Stored], dtype: torch.dtype) -> Arranged:
    """`linears`, all of `scheme` and with the same inputs, as one weight, their rows below each other.

    `dtype` is that of the activations. On a GPU the weight is there when this returns: kernels read weights before
    their predecessors in the stream have finished. Raises ValueError for linears without rows, for one that ends within
    a block of rows where another follows, and what `packed_codes` raises.
    """
    total, weight = sum(linear.shape[0] for linear in linears), None
    if any(linear.shape[0] % scheme.block_rows for linear in linears[:-1]):
        raise ValueError(f"a linear ends within a block of {scheme.block_rows} rows, and another follows")
    rows = _floating_rows if scheme.grid.name in FLOATING else _integer_rows
    for start in range(0, total, ROWS_AT_ONCE):
        part = rows(scheme, list(_pieces(linears, start, min(start + ROWS_AT_ONCE, total))), dtype)
        weight = layout.place(weight, part, start, total)
    if weight is None:
        raise ValueError("a weight without rows has no layout")
    if weight.codes.is_cuda:
        torch.cuda.synchronize(weight.codes.device)
    return weight


def _integer_rows(scheme: Scheme, pieces: Sequence[Piece], dtype: torch.dtype) -> Arranged:
    decoded = [packed_codes(linear.tensors, scheme, linear.shape, low, high) for linear, low, high in pieces]
    codes = torch.cat([piece.codes.to(torch.int8) for piece in decoded])
    scale = torch.cat([piece.scale for piece in decoded])
    if narrow(scheme):
        return layout.arrange_narrow(codes, scale, scheme.group_size or 0)
    zeros = [piece.zero for piece in decoded if piece.zero is not None]
    zero = torch.cat(zeros) if zeros else None
    return layout.arrange(codes, scale, zero, scheme.grid.bits, scheme.group_size or 0, dtype)


def _floating_rows(scheme: Scheme, pieces: Sequence[Piece], dtype: torch.dtype) -> Arranged:
    del dtype  # the layout is the same for both
    decoded = [packed_codes(linear.tensors, scheme, linear.shape, low, high) for linear, low, high in pieces]
    codes = torch.cat([scheme.grid.encode(piece.codes) for piece in decoded])
    if narrow(scheme):
        scale = torch.cat([piece.scale.float() for piece in decoded])
        return layout.arrange_narrow(codes.view(torch.float8_e4m3fn), scale, scheme.group_size or 0)
    if scheme.group_size is None:
        factors = torch.cat([piece.scale.float() for piece in decoded])
        return layout.arrange_floating(codes.view(torch.uint8), None, factors.view(-1), scheme.grid.bits)
    scale = torch.cat([linear.tensors["weight_scale"][low:high] for linear, low, high in pieces])
    factors = None
    if scheme.global_scale:
        factors = torch.cat(
            [1 / linear.tensors["weight_global_scale"].expand(high - low) for linear, low, high in pieces]
        )
    return layout.arrange_floating(codes.view(torch.uint8), scale, factors, scheme.grid.bits)


def _pieces(linears: Sequence[Stored], start: int, stop: int) -> Iterator[Piece]:
    """Rows `start` to `stop` of the linears one below the other."""
    first = 0
    for linear in linears:
        low, high = max(start - first, 0), min(stop - first, linear.shape[0])
        if low < high:
            yield linear, low, high
        first += linear.shape[0]
