"""Kernels against the reference decoder: what runs a packed linear here must compute what its tensors stand for.

One linear of every shape and scheme is enough, with its real weights. What an error may be is measured, not guessed:
against float64, a kernel may err no more than a dense product in the same dtype does, give or take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from ...formats.scheme import Scheme
from ...kernels.activations import stored_input_scale
from ...kernels.lowbit.narrow import values
from ...kernels.lowbit.ops import inputs
from ...kernels.lowbit.packed import Stored, arranged, misfit
from ...kernels.lowbit.product import as_multiplied, picked, product
from ...kernels.reference import decode_rows
from ...kernels.sparse import product as sparse_product
from ...kernels.sparse.layout import gathered
from ...kernels.sparse_linear import ROWS_AT_ONCE, fits
from .checks import Check, check
from .stored import Packed, rows_at_a_time

TOKENS = (1, 16, 64, 256)
MOST = 1.5  # times the error of the dense product
SEED = 0


@dataclass
class KernelChecks:
    """Collects the linears that are read anyway, and looks at the first of each kind on `device`."""

    device: torch.device
    seen: set[tuple[Scheme, tuple[int, int]]] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)

    def look(self, linear: Packed, tensors: Mapping[str, Tensor]) -> None:
        """Compare products with `linear` of `tensors`, unless one of its shape and scheme was looked at before.

        Raises InputError where the environment asks for a kernel that cannot run.
        """
        kind = (linear.scheme, linear.shape)
        if kind in self.seen or (misfit(linear.scheme) is not None and not fits(linear.scheme)):
            return
        self.seen.add(kind)
        moved = {suffix: tensor.to(self.device) for suffix, tensor in tensors.items()}
        fault_of = _sparse_fault if fits(linear.scheme) else _fault
        for tokens in TOKENS:
            name, fault = fault_of(linear.scheme, Stored(moved, linear.shape), tokens, self.device)
            self.names.add(name)
            if fault is not None:
                self.faults.append(f"'{linear.name}' times {tokens} tokens by {name}: {fault}")

    def result(self) -> Check:
        """Whether all agreed."""
        ran = " and ".join(sorted(self.names)) or "nothing to run"
        return check("kernels", self.faults, f"{len(self.seen)} shapes on {self.device.type}: {ran}")


def _fault(scheme: Scheme, stored: Stored, tokens: int, device: torch.device) -> tuple[str, str | None]:
    """The implementation that ran, and what was wrong with its results."""
    dtype = stored.tensors["weight_scale"].dtype
    dtype = dtype if dtype == torch.float16 else torch.bfloat16
    x = torch.randn(tokens, stored.shape[1], generator=torch.Generator().manual_seed(SEED)).to(device, dtype)
    weight = as_multiplied(arranged(scheme, [stored], dtype), scheme.activation, tokens, dtype)
    given, token_scale = inputs(x, weight, scheme.activation, stored_input_scale(stored.tensors))
    name = picked(weight, tokens, dtype).name
    y = product(given, weight, None, token_scale, dtype)
    if not torch.equal(y, product(given, weight, None, token_scale, dtype)):
        return name, "two runs differ"
    return name, _judged(y, given, token_scale, scheme, stored)


def _sparse_fault(scheme: Scheme, stored: Stored, tokens: int, device: torch.device) -> tuple[str, str | None]:
    """`_fault` of a weight whose values are stored as they are."""
    rows = (
        decode_rows(stored.tensors, scheme, stored.shape, start, min(start + ROWS_AT_ONCE, stored.shape[0]))
        for start in range(0, stored.shape[0], ROWS_AT_ONCE)
    )
    weight = sparse_product.arrange(gathered(rows, stored.shape, torch.bfloat16, device))
    x = torch.randn(tokens, stored.shape[1], generator=torch.Generator().manual_seed(SEED)).to(device, torch.bfloat16)
    y = sparse_product.product(x, weight)
    name = sparse_product.picked(weight, tokens, y.dtype).name
    if not torch.equal(y, sparse_product.product(x, weight)):
        return name, "two runs differ"
    return name, _judged(y, x, None, scheme, stored)


def _judged(y: Tensor, x: Tensor, token_scale: Tensor | None, scheme: Scheme, stored: Stored) -> str | None:
    error, allowed = errors(y, x, token_scale, scheme, stored)
    return None if error <= MOST * allowed else f"an error of {error:.2e}, where a dense product has {allowed:.2e}"


def errors(y: Tensor, x: Tensor, token_scale: Tensor | None, scheme: Scheme, stored: Stored) -> tuple[float, float]:
    """Relative errors against float64 of `y`, and of a dense product in its dtype (of rounding, for 8-bit inputs)."""
    wide = values(x, token_scale, scheme.grid.bits)
    ours = dense = total = 0.0
    step = rows_at_a_time(stored.shape[1])
    for start in range(0, stored.shape[0], step):
        stop = min(start + step, stored.shape[0])
        rows = decode_rows(stored.tensors, scheme, stored.shape, start, stop)
        exact = wide @ rows.double().T
        plain = exact.to(y.dtype) if token_scale is not None else functional.linear(x, rows.to(y.dtype))
        ours += float((y[:, start:stop].double() - exact).square().sum())
        dense += float((plain.double() - exact).square().sum())
        total += float(exact.square().sum())
    scale = max(total, torch.finfo(torch.float64).tiny)
    return (ours / scale) ** 0.5, (dense / scale) ** 0.5
