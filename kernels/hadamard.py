"""The block Hadamard rotation of a linear's inputs: what is done to activations online, and to weights before rounding.

Outliers are spread over the block that shares them, so that a block is close to Gaussian and fits a grid of few codes
(QuaRot, Ashkboos et al. 2024, arXiv 2404.00456; in blocks for microscaling FP4: MR-GPTQ, arXiv 2509.23202, section 4).
The matrix of Sylvester is symmetric and, over the root of its order, its own inverse: weights and activations are
turned by the same function, and turned back by it too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats.scheme import Scheme


def rotate(x: Tensor, block: int) -> Tensor:
    """`x` [..., features] with every `block` neighbouring features times the orthonormal Hadamard matrix of that order.

    Computed in float32 (float64 for such `x`) by butterflies of sums and differences, whose bits depend neither on the
    device nor on how many rows are turned together; rounded once, to the dtype of `x`. Raises ValueError for a block
    that is no power of two or does not divide the features.
    """
    if block < 1 or block & (block - 1) or x.shape[-1] % block:
        raise ValueError(f"blocks of {block} do not fit {x.shape[-1]} features")
    wide = x if x.dtype == torch.float64 else x.float()
    span = 1
    while span < block:
        pairs = (x.shape[-1] // (2 * span), 2, span)
        low, high = wide.reshape(*x.shape[:-1], *pairs).unbind(-2)
        wide = torch.stack([low + high, low - high], dim=-2)
        span *= 2
    return (wide.reshape(x.shape) * block**-0.5).to(x.dtype)


def rotated(x: Tensor, scheme: Scheme) -> Tensor:
    """`x` [..., in] in the basis that linears of `scheme` compute in, or, given that, back: `x` itself where it is one.

    For activations, and for the rows of a weight [out, in].
    """
    return x if scheme.rotation is None else rotate(x, scheme.rotation)
