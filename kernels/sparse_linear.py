"""Sparse linears on a GPU: brought from the layout on disk into that of the kernels when a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..formats.scheme import Scheme
from .hadamard import rotated
from .packed_linear import PackedLinear
from .sparse.layout import gathered
from .sparse.product import Arranged, arrange, dense
from .sparse_reference import SPARSE

ROWS_AT_ONCE = 1024


def fits(scheme: Scheme) -> bool:
    """Whether weights of `scheme` are sparse and not rounded."""
    return scheme.packing in SPARSE


class SparseLinear(PackedLinear):
    """A sparse linear whose weight is in a layout of the kernels (`sparse/layout.py`, `sparse/three_layer.py`).

    Its tensors are buffers that no state dict holds: a checkpoint is written from the layout on disk.
    """

    def __init__(self, scheme: Scheme, weight: Arranged, bias: Tensor | None) -> None:
        super().__init__(scheme, (weight.out_features, weight.in_features), {}, bias)
        self._kind = weight.each(lambda tensor: tensor.new_empty(0))
        for name, tensor in weight.tensors.items():
            self.register_buffer(name, tensor, persistent=False)

    @property
    def arranged(self) -> Arranged:
        """The weight."""
        return replace(self._kind, **self.tensors)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features], in the dtype of `x`."""
        from .sparse.ops import apply

        return apply(rotated(x, self.scheme), self.arranged, self.bias)

    def weight_rows(self, start: int = 0, stop: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Rows `start` to `stop` of the weight in `dtype`: [rows, in_features]. All of it is expanded on the way."""
        return dense(self.arranged)[start:stop].to(dtype)


def merge_sparse(linears: Sequence[PackedLinear], dtype: torch.dtype) -> SparseLinear:
    """The linears, all with the same inputs, as one, its weight in `dtype`; they lose their tensors.

    Raises InputError where the environment asks for a kernel that cannot run.
    """
    first = linears[0]
    shape = (sum(linear.out_features for linear in linears), first.in_features)
    device = next(iter(first.tensors.values())).device
    weight = arrange(gathered(_rows(linears, dtype), shape, dtype, device))
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    for linear in linears:
        for name in list(linear.tensors):
            delattr(linear, name)
    return SparseLinear(first.scheme, weight, torch.cat(biases) if biases else None)


def _rows(linears: Sequence[PackedLinear], dtype: torch.dtype) -> Iterator[Tensor]:
    for linear in linears:
        for start in range(0, linear.out_features, ROWS_AT_ONCE):
            yield linear.weight_rows(start, min(start + ROWS_AT_ONCE, linear.out_features), dtype)
