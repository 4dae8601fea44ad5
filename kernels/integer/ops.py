"""The products as PyTorch operators, so that `torch.compile` and CUDA graphs take them as they are.

`compress_llm::linear` and `compress_llm::int8_linear` take a weight in fragment order apart into tensors and numbers,
which is what an operator may be given; `compress_llm::quantize_tokens` makes the int8 activations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats.grids import INT8
from ...formats.scheme import Activation
from ..activations import activation_codes
from .layout import Arranged
from .product import product


@torch.library.custom_op("compress_llm::linear", mutates_args=())
def linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group: int,
    out_features: int,
) -> Tensor:
    """x [M, in] weight^T + bias: [M, out] in the dtype of `x`, float16 or bfloat16 (any float by the reference)."""
    weight = Arranged(codes, scales, zeros, bits, group, out_features, x.shape[1])
    return product(x, weight, bias, None, x.dtype)


@linear.register_fake
def _(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, bits: int, group: int, out: int
) -> Tensor:
    del codes, scales, zeros, bias, bits, group
    return x.new_empty(x.shape[0], out)


@torch.library.custom_op("compress_llm::int8_linear", mutates_args=())
def int8_linear(
    x: Tensor, token_scale: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Int8 x [M, in] int8 weight^T, scaled, + bias: [M, out] in `dtype`."""
    weight = Arranged(codes, scales, None, 8, 0, scales.shape[0], x.shape[1], True)
    return product(x, weight, bias, token_scale, dtype)


@int8_linear.register_fake
def _(x: Tensor, token_scale: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    del token_scale, codes, bias
    return x.new_empty(x.shape[0], scales.shape[0], dtype=dtype)


@torch.library.custom_op("compress_llm::quantize_tokens", mutates_args=())
def quantize_tokens(x: Tensor, input_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [M, in] as int8 codes [M, in] and float32 scales [M], rounded as `activations.activation_codes` does.

    The scales are one a token, found in `x`, or `input_scale` [1] for all of them.
    """
    if x.is_cuda and x.dtype in (torch.float16, torch.bfloat16):
        from .triton_quantize import quantize

        early = torch.cuda.get_device_capability(x.device) >= (9, 0)
        return quantize(x.contiguous(), input_scale=input_scale, pdl=early)
    kind = Activation(INT8) if input_scale is None else Activation(INT8, granularity="tensor", dynamic=False)
    codes, scale = activation_codes(x, kind, input_scale)
    return codes.to(torch.int8), scale.float().view(-1).expand(x.shape[0]).contiguous()


@quantize_tokens.register_fake
def _(x: Tensor, input_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    del input_scale
    return torch.empty_like(x, dtype=torch.int8), x.new_empty(x.shape[0], dtype=torch.float32)


def apply(x: Tensor, weight: Arranged, bias: Tensor | None, input_scale: Tensor | None = None) -> Tensor:
    """x [..., in] weight^T + bias for any kind of weight in fragment order: [..., out] in the dtype of `x`.

    Int8 activations are scaled by what is found in each token, or all by `input_scale` [1].
    """
    flat = x.reshape(-1, x.shape[-1])
    if weight.integer:
        codes, token_scale = torch.ops.compress_llm.quantize_tokens(flat, input_scale)
        y = torch.ops.compress_llm.int8_linear(codes, token_scale, weight.codes, weight.scales, bias, x.dtype)
    else:
        y = torch.ops.compress_llm.linear(
            flat, weight.codes, weight.scales, weight.zeros, bias, weight.bits, weight.group, weight.out_features
        )
    return y.view(*x.shape[:-1], weight.out_features)
