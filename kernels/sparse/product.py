"""The product with a sparse weight in a layout of the kernels, by whichever implementation the registry picks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from ...formats.errors import InputError
from ..registry import THREE_LAYER, Pick, Problem, Sparse, pick
from . import cuda_three_layer, layout, three_layer
from .cuda_batch import batch, configuration
from .cuda_decode import MOST_TOKENS, decode, unpack
from .layout import Bitmap
from .routes import routes
from .three_layer import ThreeLayer

Arranged = Bitmap | ThreeLayer


def pick_for(
    shape: tuple[int, int],
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    sparse: Sparse = "any",
    asked: str | None = None,
) -> Pick:
    """What runs a product with a sparse weight (out, in) = `shape` in the layout `sparse` on `device`, and why.

    Raises InputError where the implementation `asked` for, or named by the environment, cannot.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return pick(Problem(device.type, capability, tokens, *shape, dtype, 16, 0, False, sparse=sparse), asked)


def picked(weight: Arranged, tokens: int, dtype: torch.dtype, asked: str | None = None) -> Pick:
    """The implementation that `product` runs, and why. Raises InputError where the one asked for cannot."""
    sparse = "three-layer" if isinstance(weight, ThreeLayer) else "bitmap"
    return pick_for((weight.out_features, weight.in_features), tokens, dtype, weight.device, sparse, asked)


def arrange(weight: Tensor, asked: str | None = None) -> Arranged:
    """The sparse `weight` [out, in], float16 or bfloat16, in the layout of the implementation that is picked for it.

    Raises InputError where the one `asked` for cannot run, and ValueError as the layouts' own functions do.
    """
    layout.check(weight)
    name = pick_for((weight.shape[0], weight.shape[1]), 1, weight.dtype, weight.device, asked=asked).name
    return three_layer.arrange(weight) if name == THREE_LAYER else layout.arrange(weight)


def dense(weight: Arranged) -> Tensor:
    """The weight [out, in], bit for bit, in plain torch."""
    return three_layer.dense(weight) if isinstance(weight, ThreeLayer) else layout.dense(weight)


def product(
    x: Tensor,
    weight: Arranged,
    bias: Tensor | None = None,
    asked: str | None = None,
    route: str | None = None,
    pdl: bool = True,
) -> Tensor:
    """x [M, in] weight^T + bias as [M, out] in the dtype of `x`.

    `route` names one of routes.NAMES for the CUDA kernels, None the measured choice; `pdl` lets a kernel start before
    its predecessor in the stream has finished. Raises InputError for an implementation that is asked for and cannot
    run, and for a dtype that a GPU's kernels do not have the weight in.
    """
    name = picked(weight, x.shape[0], x.dtype, asked).name
    if name != "reference" and weight.dtype != x.dtype:
        cause = f"the weights are stored for {weight.dtype}"
        raise InputError(f"activations of {x.dtype}", cause, "load the model with the dtype it is to run in")
    if x.shape[0] == 0:
        return x.new_empty(0, weight.out_features)
    x, bias = x.contiguous(), None if bias is None else bias.to(x.dtype)
    if name == "reference":
        return reference(x, weight, bias)
    if isinstance(weight, ThreeLayer):
        with torch.cuda.device(x.device):
            return _three_layer(x, weight, bias, route, pdl)
    if name == "cuda":
        with torch.cuda.device(x.device):
            return _cuda(x, weight, bias, route, pdl)
    from . import triton_sparse

    return triton_sparse.product(x, weight, bias)


def reference(x: Tensor, weight: Arranged, bias: Tensor | None) -> Tensor:
    """The same in plain torch."""
    return linear(x, dense(weight).to(x.dtype), bias)


def _cuda(x: Tensor, weight: Bitmap, bias: Tensor | None, route: str | None, pdl: bool) -> Tensor:
    tokens = x.shape[0]
    route = route or routes(torch.cuda.get_device_properties(x.device).name).name(tokens, weight.cut.tiles)
    if route == "dense":
        return linear(x, unpack(weight, pdl), bias)
    x, y = _aligned(x), x.new_empty(tokens, weight.out_features)
    if route == "decode":
        for few, out in zip(x.split(MOST_TOKENS), y.split(MOST_TOKENS), strict=True):
            decode(few, weight, out, bias, pdl)
    else:
        batch(x, weight, y, configuration(weight, tokens), bias, pdl)
    return y


def _three_layer(x: Tensor, weight: ThreeLayer, bias: Tensor | None, route: str | None, pdl: bool) -> Tensor:
    """One kernel for a handful of tokens, the dense weight for more: nothing between them."""
    if route == "dense" or x.shape[0] > cuda_three_layer.MOST_TOKENS:
        return linear(x, cuda_three_layer.unpack(weight, pdl), bias)
    y = x.new_empty(x.shape[0], weight.out_features)
    cuda_three_layer.multiply(_aligned(x), weight, y, bias, pdl)
    return y


def _aligned(x: Tensor) -> Tensor:
    """`x`, which kernels read in pieces of 16 bytes."""
    return x.clone() if x.data_ptr() % 16 else x
