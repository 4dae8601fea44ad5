"""Products with packed weights against dense ones in bfloat16: how fast, how far from the floor, and whether right.

Weights are random, of the shapes asked for; several copies take turns. A product that is wrong, or differs from one run
to the next, is a fault of the report, however fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from ...formats.packings import packing
from ...formats.progress import Track
from ...formats.rounded import QParams, Rounded
from ...formats.scheme import Scheme
from ...kernels.integer.layout import Arranged
from ...kernels.integer.ops import quantize_tokens
from ...kernels.integer.packed import Stored, arranged
from ...kernels.integer.product import picked, product
from ...kernels.reference import decode_rows
from ...quantizers.input_scales import input_scale
from ...quantizers.scales import shared, storage
from .kernel_check import MOST, errors
from .timing import Limits, Timing, copies, interleaved

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


class Weights:
    """Copies of one random weight in the layout of the kernels, and dense."""

    def __init__(self, scheme: Scheme, shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> None:
        self.scheme, self.shape, self.dtype, self.device = scheme, shape, dtype, device
        self.stored = Stored(random_weight(scheme, shape, dtype, device), shape)
        first = arranged(scheme, [self.stored], dtype)
        self.nbytes = sum(tensor.nbytes for tensor in (first.codes, first.scales, first.zeros) if tensor is not None)
        self.arranged = [first, *(_copy(first) for _ in range(copies(self.nbytes, device) - 1))]
        dense = decode_rows(self.stored.tensors, scheme, shape, dtype=dtype)
        self.dense = [dense, *(dense.clone() for _ in range(copies(dense.nbytes, device) - 1))]
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def product(self, x: Tensor, weight: Arranged, pdl: bool = True) -> Tensor:
        """What a packed linear computes: the quantisation of `x` where there is one, and the product."""
        if not weight.integer:
            return product(x, weight, None, None, self.dtype, pdl=pdl)
        codes, token_scale = quantize_tokens(x, self.stored.tensors.get("input_scale"))
        return product(codes, weight, None, token_scale, self.dtype, pdl=pdl)


def bench_kernels(
    kinds: Sequence[Kind], tokens: Sequence[int], device: torch.device, limits: Limits, track: Track
) -> Iterator[Cell]:
    """A cell for every kind and number of tokens. Raises InputError for a kernel asked for that cannot run."""
    for scheme, shape in track(kinds, "measuring kernels", len(kinds)):
        weights = Weights(scheme, shape, device, torch.bfloat16)
        for count in tokens:
            yield cell(weights, count, limits)


def cell(weights: Weights, tokens: int, limits: Limits) -> Cell:
    """One product of `weights`, checked and timed."""
    scheme, (rows, columns) = weights.scheme, weights.shape
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, columns, generator=generator).to(weights.device, weights.dtype)
    pick = picked(weights.arranged[0], tokens, weights.dtype)
    y, again = weights.product(x, weights.arranged[0]), weights.product(x, weights.arranged[-1])
    error, dense_error = _errors(weights, x, y)
    times = _times(weights, x, early=pick.name == "cuda")
    moved = weights.nbytes + x.nbytes + y.nbytes
    return Cell(
        scheme=scheme.name,
        group_size=scheme.group_size,
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


def _errors(weights: Weights, x: Tensor, y: Tensor) -> tuple[float, float]:
    if not weights.arranged[0].integer:
        return errors(y, x, None, weights.scheme, weights.stored)
    codes, token_scale = quantize_tokens(x, weights.stored.tensors.get("input_scale"))
    return errors(y, codes, token_scale, weights.scheme, weights.stored)


def _times(weights: Weights, x: Tensor, early: bool) -> dict[str, Timing]:
    def packed(pdl: bool) -> list[Callable[[], object]]:
        return [lambda weight=weight: weights.product(x, weight, pdl) for weight in weights.arranged]

    candidates = {"packed": packed(True)}
    if early:
        candidates["waiting"] = packed(False)
    candidates["dense"] = [lambda dense=dense: functional.linear(x, dense) for dense in weights.dense]
    return interleaved(candidates, weights.device)


def random_weight(
    scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Tensors by suffix of a weight whose codes use the whole grid, with scales like those of a trained model."""
    rows, columns = shape
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
    zeros = None if weight.zeros is None else weight.zeros.clone()
    return replace(weight, codes=weight.codes.clone(), scales=weight.scales.clone(), zeros=zeros)
