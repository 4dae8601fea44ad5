"""The product with a sparse weight in the layout of the kernels, by whichever implementation the registry picks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from ...formats.errors import InputError
from ..registry import Pick, Problem, pick
from .cuda_batch import batch, configuration
from .cuda_decode import decode, unpack
from .layout import Bitmap, dense
from .routes import routes


def problem(weight: Bitmap, tokens: int, dtype: torch.dtype) -> Problem:
    """What the registry is asked for a product of `weight` with `tokens` tokens and results of `dtype`."""
    device = weight.values.device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return Problem(device.type, capability, tokens, weight.out_features, weight.in_features, dtype, 16, 0, False)


def picked(weight: Bitmap, tokens: int, dtype: torch.dtype, asked: str | None = None) -> Pick:
    """The implementation that `product` runs, and why. Raises InputError where the one asked for cannot."""
    return pick(problem(weight, tokens, dtype), asked)


def product(
    x: Tensor,
    weight: Bitmap,
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
    if name != "reference" and weight.values.dtype != x.dtype:
        cause = f"the weights are stored for {weight.values.dtype}"
        raise InputError(f"activations of {x.dtype}", cause, "load the model with the dtype it is to run in")
    x, bias = x.contiguous(), None if bias is None else bias.to(x.dtype)
    if name == "cuda" and x.shape[0] > 0:
        with torch.cuda.device(x.device):
            return _cuda(x, weight, bias, route, pdl)
    if name == "triton" and x.shape[0] > 0:
        from . import triton_sparse

        return triton_sparse.product(x, weight, bias)
    return reference(x, weight, bias)


def reference(x: Tensor, weight: Bitmap, bias: Tensor | None) -> Tensor:
    """The same in plain torch."""
    return linear(x, dense(weight).to(x.dtype), bias)


def _cuda(x: Tensor, weight: Bitmap, bias: Tensor | None, route: str | None, pdl: bool) -> Tensor:
    tokens = x.shape[0]
    route = route or routes(torch.cuda.get_device_properties(x.device).name).name(tokens)
    if route == "dense":
        return linear(x, unpack(weight, pdl), bias)
    if x.data_ptr() % 16:
        x = x.clone()  # x is read in pieces of 16 bytes
    y = torch.empty(tokens, weight.out_features, dtype=x.dtype, device=x.device)
    if route == "decode":
        decode(x, weight, y, bias, pdl)
    else:
        batch(x, weight, y, configuration(weight, tokens), bias, pdl)
    return y
