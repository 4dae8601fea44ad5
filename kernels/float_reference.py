"""What floating-point codes, weights or scales, mean: for the reference decoder, by tables and torch's own formats.

No code is shared with the grids of `formats`: each checks the other.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..formats.scheme import Scheme

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1_values(packed: Tensor) -> Tensor:
    """uint8 [rows, bytes], the first code in the low half, to float32 [rows, 2 · bytes]."""
    table = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], device=packed.device)
    pairs = torch.stack([packed % 16, packed // 16], dim=2)
    return table[pairs.int()].flatten(1)


def round_e2m1(x: Tensor) -> Tensor:
    """The nearest E2M1 values, halves to the even code, saturating, in the dtype of `x`."""
    size = x.abs().clamp_(max=E2M1_VALUES[-1])
    step = torch.where(size < 4, torch.where(size < 2, 0.5, 1.0), 2.0).to(x.dtype)
    return ((size / step).round_() * step).copysign_(x)  # even multiples of a step have even codes


def round_e4m3(x: Tensor) -> Tensor:
    """The nearest E4M3 values, saturating, in the dtype of `x`."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def e8m0_values(codes: Tensor) -> Tensor:
    """uint8 exponents to float32 powers of two; 255 is NaN."""
    return codes.view(torch.float8_e8m0fnu).float()


def power_below(x: Tensor) -> Tensor:
    """The greatest power of two that is no greater than each `x` > 0 (float32)."""
    return torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1)


def scale_rows(tensors: Mapping[str, Tensor], scheme: Scheme, rows: slice) -> Tensor:
    """The scales of the weight's rows `rows`: as stored, or float32 where they are codes; [rows, groups]."""
    stored = tensors["weight_scale"]
    if scheme.strategy == "tensor":
        return stored.expand(rows.stop - rows.start).unsqueeze(1)
    if scheme.strategy == "block":
        blocks = torch.arange(rows.start, rows.stop, device=stored.device) // scheme.block_rows
        return stored[blocks]
    if stored.dtype == torch.uint8:
        return e8m0_values(stored[rows])
    if "weight_global_scale" in tensors:
        return stored[rows].float() / tensors["weight_global_scale"]
    return stored[rows]
