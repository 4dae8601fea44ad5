"""One door to the product with a packed weight: whatever kernel runs, this is the function that is called.

Here it is the reference (decode some rows, multiply, forget them), or the hardware's own product where that is asked
for.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from ..formats.scheme import Scheme
from .activations import quantize_activation, stored_input_scale
from .hadamard import rotated
from .lowbit.packed import microscaled
from .reference import decode_rows

DECODED_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Weights decoded before they are multiplied and dropped, by device: a bound on the dense copy that exists at any time.
On a CPU they are few enough to stay in its cache."""


def matmul(
    x: Tensor, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int], bias: Tensor | None = None
) -> Tensor:
    """x · Wᵀ + bias for the packed weight (out, in) = `shape`, with inputs rotated and quantised as `scheme` says.

    `x` [..., in] of any float dtype; weights are decoded to it, and the result [..., out] has it too. `tensors` maps
    suffixes to tensors on the device of `x`.
    """
    x = rotated(x, scheme)
    if scheme.activation is not None and microscaled(scheme) and x.is_cuda:
        from .lowbit.scaled import chosen, product

        if chosen(scheme, shape, x.shape[:-1].numel(), x.dtype, x.device):
            return product(x, tensors, scheme.activation, bias)
    if scheme.activation is not None:
        x = quantize_activation(x, scheme.activation, stored_input_scale(tensors))
    out_features, in_features = shape
    step = max(1, DECODED_AT_ONCE.get(x.device.type, DECODED_AT_ONCE["cpu"]) // in_features)
    if step >= out_features:
        return functional.linear(x, decode_rows(tensors, scheme, shape, dtype=x.dtype), bias)
    parts = []
    for start in range(0, out_features, step):
        stop = min(start + step, out_features)
        weight = decode_rows(tensors, scheme, shape, start, stop, x.dtype)
        parts.append(functional.linear(x, weight, None if bias is None else bias[start:stop]))
    return torch.cat(parts, dim=-1)
