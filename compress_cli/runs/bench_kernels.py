"""Products with packed weights against dense ones in bfloat16: how fast, how far from the floor, and whether right.

Weights are random, of the shapes asked for; several copies take turns. A product that is wrong, or differs from one run
to the next, is a fault of the report, however fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ...formats.packings import packing
from ...formats.progress import Track
from ...formats.rounded import QParams, Rounded
from ...formats.scheme import Scheme
from ...kernels.activations import stored_input_scale
from ...kernels.lowbit.layout import Arranged
from ...kernels.lowbit.ops import inputs
from ...kernels.lowbit.packed import Stored, arranged
from ...kernels.lowbit.product import as_multiplied, picked, product
from ...kernels.reference import decode_rows
from ...kernels.registry import THREE_LAYER, Pick
from ...kernels.sparse_linear import fits
from ...quantizers.input_scales import input_scale
from ...quantizers.scales import shared, storage
from .bench_sparse import SparseWeights
from .kernel_check import MOST, errors
from .timing import Call, Limits, Timing, copies, interleaved

Kind = tuple[Scheme, tuple[int, int]]
"""A scheme, and the (out, in) of a weight."""


@dataclass(frozen=True)
class Cell:
    """One product. Times in microseconds, quantisation of the activations included.

    `without_early_start_us` is of kernels that wait for their predecessors to finish (None where none could start
    early). `floor_us` is what moving its bytes, or its operations, take at the least. `error` and `dense_error` are
    relative, against float64; `repeats` says whether two runs gave the same bits.
    """

    scheme: str
    group_size: int | None
    out_features: int
    in_features: int
    tokens: int
    kernel: str
    reason: str
    us: float
    without_early_start_us: float | None
    dense_us: float
    speedup: float
    floor_us: float
    error: float
    dense_error: float
    repeats: bool

    @property
    def passed(self) -> bool:
        """Whether the product is right."""
        return self.repeats and self.error <= MOST * self.dense_error


class Measured(Protocol):
    """Copies of one random weight of `nbytes`: `arranged`, in the layout of its kernels, and `dense`."""

    name: str
    group_size: int | None
    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    dense: list[Tensor]

    def products(self, x: Tensor, pdl: bool = True) -> list[Callable[[], Tensor]]:
        """What a packed linear computes for `x`, a call for every copy."""
        ...

    def picked(self, tokens: int) -> Pick:
        """The implementation that runs these calls."""
        ...

    def errors(self, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Relative errors against float64, of `y` and of the dense product."""
        ...


class Weights:
    """Copies of one random weight of codes, integers or floating-point numbers. A `Measured`."""

    def __init__(self, scheme: Scheme, shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> None:
        self.scheme, self.shape, self.dtype, self.device = scheme, shape, dtype, device
        self.name, self.group_size = scheme.name, scheme.group_size
        self.stored = Stored(random_weight(scheme, shape, dtype, device), shape)
        first = arranged(scheme, [self.stored], dtype)
        self.nbytes = sum(tensor.nbytes for tensor in first.tensors if tensor is not None)
        self.arranged = [first, *(_copy(first) for _ in range(copies(self.nbytes, device) - 1))]
        dense = decode_rows(self.stored.tensors, scheme, shape, dtype=dtype)
        self.dense = [dense, *(dense.clone() for _ in range(copies(dense.nbytes, device) - 1))]
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def product(self, x: Tensor, weight: Arranged, pdl: bool = True) -> Tensor:
        """What a packed linear computes: the quantisation of `x` where there is one, and the product."""
        given, token_scale = self.inputs(x)
        return product(given, self.multiplied(weight, len(x)), None, token_scale, self.dtype, pdl=pdl)

    def multiplied(self, weight: Arranged, tokens: int) -> Arranged:
        """`weight`, one of the copies, as a product with so many tokens takes it."""
        return as_multiplied(weight, self.scheme.activation, tokens, self.dtype)

    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """`x` as the product takes it, and scales of its tokens where it is quantised."""
        weight = self.multiplied(self.arranged[0], len(x))
        return inputs(x, weight, self.scheme.activation, stored_input_scale(self.stored.tensors))

    def products(self, x: Tensor, pdl: bool = True) -> list[Callable[[], Tensor]]:
        """`product` of `x` with every copy."""
        return [lambda weight=weight: self.product(x, weight, pdl) for weight in self.arranged]

    def picked(self, tokens: int) -> Pick:
        """The implementation that `product` runs."""
        return picked(self.multiplied(self.arranged[0], tokens), tokens, self.dtype)

    def errors(self, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Relative errors against float64, of `y` and of the dense product."""
        return errors(y, *self.inputs(x), self.scheme, self.stored)


def bench_kernels(
    kinds: Sequence[Kind], tokens: Sequence[int], device: torch.device, limits: Limits, track: Track
) -> Iterator[Cell]:
    """A cell for every kind and number of tokens. Raises InputError for a kernel asked for that cannot run."""
    for scheme, shape in track(kinds, "measuring kernels", len(kinds)):
        if fits(scheme):
            kept = 1.0 if scheme.sparsity is None else 1 - scheme.sparsity.ratio
            weights = SparseWeights(shape, device, torch.bfloat16, kept=kept, name=scheme.name)
        else:
            weights = Weights(scheme, shape, device, torch.bfloat16)
        for count in tokens:
            yield cell(weights, count, limits)


def cell(weights: Measured, tokens: int, limits: Limits) -> Cell:
    """One product of `weights`, checked and timed."""
    rows, columns = weights.shape
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, columns, generator=generator).to(weights.device, weights.dtype)
    pick = weights.picked(tokens)
    products = weights.products(x)
    y, again = products[0](), products[-1]()
    error, dense_error = weights.errors(x, y)
    times = _times(weights, x, early=pick.name in ("cuda", THREE_LAYER))
    moved = weights.nbytes + x.nbytes + y.nbytes
    return Cell(
        scheme=weights.name,
        group_size=weights.group_size,
        out_features=rows,
        in_features=columns,
        tokens=tokens,
        kernel=pick.name,
        reason=pick.reason,
        us=times["packed"].us,
        without_early_start_us=times["waiting"].us if "waiting" in times else None,
        dense_us=times["dense"].us,
        speedup=times["dense"].us / times["packed"].us,
        floor_us=limits.floor_us(moved, 2 * tokens * rows * columns),
        error=error,
        dense_error=dense_error,
        repeats=torch.equal(y, again),
    )


def _times(weights: Measured, x: Tensor, early: bool) -> dict[str, Timing]:
    candidates: dict[str, list[Call]] = {"packed": [*weights.products(x)]}
    if early:
        candidates["waiting"] = [*weights.products(x, pdl=False)]
    candidates["dense"] = [lambda dense=dense: functional.linear(x, dense) for dense in weights.dense]
    return interleaved(candidates, weights.device)


def random_weight(
    scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Tensors by suffix of a weight whose codes use the whole grid, with scales like those of a trained model.

    Raises InputError for groups that do not divide the inputs.
    """
    rows, columns = shape
    packing(scheme).layout(scheme, rows, columns, dtype)  # raises
    grid, groups = scheme.grid, scheme.groups(columns)
    generator = torch.Generator(device).manual_seed(0)
    low, high = int(grid.lowest), int(grid.highest)
    values = torch.empty(shape, device=device).uniform_(low - 0.5, high + 0.5, generator=generator)
    step = (0.5 + torch.rand(rows, groups, device=device, generator=generator)) * 0.05 / grid.reach
    step = shared(step, scheme.sharing_rows(rows), torch.amax)
    zero = None
    if not scheme.symmetric:
        size = (rows, groups)
        zero = torch.randint(low // 2, high // 2, size, dtype=torch.int8, device=device, generator=generator)
        zero = zero.to(dtype) + 0.25 if scheme.zero_dtype == "float" else zero
    like = QParams(step, zero)
    params = storage(scheme, "minmax", dtype, step.amax() * grid.reach).refit(step, like)
    given = None if scheme.activation is None else input_scale(scheme.activation, 4 * torch.ones(columns), dtype)
    given = None if given is None else given.to(device)
    return packing(scheme).pack(Rounded(scheme, grid.encode(values), params, given))


def _copy(weight: Arranged) -> Arranged:
    return weight.with_tensors(None if tensor is None else tensor.clone() for tensor in weight.tensors)
