"""The sparse product as a PyTorch operator, so that `torch.compile` and CUDA graphs take it as it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .geometry import read
from .layout import Bitmap
from .product import product


@torch.library.custom_op("compress_llm::sparse_linear", mutates_args=())
def sparse_linear(
    x: Tensor,
    masks: Tensor,
    values: Tensor,
    starts: Tensor,
    table: Tensor,
    bias: Tensor | None,
    cut: Sequence[int],
    head: int,
    out_features: int,
) -> Tensor:
    """x [M, in] weight^T + bias: [M, out] in the dtype of `x`; a `Bitmap` taken apart (`cut` is `Geometry.numbers`)."""
    return product(x, Bitmap(masks, values, starts, table, read(cut), head, out_features, x.shape[1]), bias)


@sparse_linear.register_fake
def _(
    x: Tensor,
    masks: Tensor,
    values: Tensor,
    starts: Tensor,
    table: Tensor,
    bias: Tensor | None,
    cut: Sequence[int],
    head: int,
    out_features: int,
) -> Tensor:
    del masks, values, starts, table, bias, cut, head
    return x.new_empty(x.shape[0], out_features)


def apply(x: Tensor, weight: Bitmap, bias: Tensor | None) -> Tensor:
    """x [..., in] weight^T + bias: [..., out] in the dtype of `x`."""
    flat = x.reshape(-1, x.shape[-1])
    y = torch.ops.compress_llm.sparse_linear(
        flat,
        weight.masks,
        weight.values,
        weight.starts,
        weight.table,
        bias,
        weight.cut.numbers(),
        weight.head,
        weight.out_features,
    )
    return y.view(*x.shape[:-1], weight.out_features)
