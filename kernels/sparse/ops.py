"""The sparse products as PyTorch operators, so that `torch.compile` and CUDA graphs take them as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .geometry import read
from .layout import Bitmap
from .product import Arranged, product
from .three_layer import ThreeLayer


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


@torch.library.custom_op("compress_llm::three_layer_linear", mutates_args=())
def three_layer_linear(
    x: Tensor, tiles: Tensor, starts: Tensor, rest: Tensor, bias: Tensor | None, cut: Sequence[int], out_features: int
) -> Tensor:
    """The same of a `ThreeLayer` taken apart."""
    return product(x, ThreeLayer(tiles, starts, rest, read(cut), out_features, x.shape[1]), bias)


@three_layer_linear.register_fake
def _(
    x: Tensor, tiles: Tensor, starts: Tensor, rest: Tensor, bias: Tensor | None, cut: Sequence[int], out_features: int
) -> Tensor:
    del tiles, starts, rest, bias, cut
    return x.new_empty(x.shape[0], out_features)


def apply(x: Tensor, weight: Arranged, bias: Tensor | None) -> Tensor:
    """x [..., in] weight^T + bias: [..., out] in the dtype of `x`."""
    flat, cut, out_features = x.reshape(-1, x.shape[-1]), weight.cut.numbers(), weight.out_features
    if isinstance(weight, ThreeLayer):
        tensors = (weight.tiles, weight.starts, weight.rest)
        y = torch.ops.compress_llm.three_layer_linear(flat, *tensors, bias, cut, out_features)
    else:
        tensors = (weight.masks, weight.values, weight.starts, weight.table)
        y = torch.ops.compress_llm.sparse_linear(flat, *tensors, bias, cut, weight.head, out_features)
    return y.view(*x.shape[:-1], out_features)
