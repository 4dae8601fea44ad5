"""The products as PyTorch operators, so that `torch.compile` and CUDA graphs take them as they are.

`compress_llm::linear`, `compress_llm::narrow_linear` and `compress_llm::mixed_linear` take a weight in fragment order
apart into tensors and numbers, which is what an operator may be given; `compress_llm::quantize_tokens` and
`compress_llm::quantize_blocks` make the 8-bit activations, `compress_llm::round_inputs` 16-bit ones of few values.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...formats.float_grids import E4M3
from ...formats.grids import INT8
from ...formats.scheme import Activation
from ..activations import activation_codes, quantize_activation
from ..registry import Problem, pick
from .cuda_quantize import quantize as cuda_quantize
from .layout import BLOCK, Arranged
from .narrow import pitch, shuffled
from .product import as_multiplied, is_mixed, product


@torch.library.custom_op("compress_llm::linear", mutates_args=())
def linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    zeros: Tensor | None,
    factors: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group: int,
    out_features: int,
    floating: bool,
) -> Tensor:
    """x [M, in] weight^T + bias: [M, out] in the dtype of `x`, float16 or bfloat16 (any float by the reference)."""
    weight = Arranged(codes, scales, zeros, bits, group, out_features, x.shape[1], floating, factors=factors)
    return product(x, weight, bias, None, x.dtype)


@linear.register_fake
def _(
    x: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    zeros: Tensor | None,
    factors: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group: int,
    out: int,
    floating: bool,
) -> Tensor:
    del codes, scales, zeros, factors, bias, bits, group, floating
    return x.new_empty(x.shape[0], out)


@torch.library.custom_op("compress_llm::narrow_linear", mutates_args=())
def narrow_linear(
    x: Tensor,
    token_scale: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    factors: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    dtype: torch.dtype,
) -> Tensor:
    """x [M, in] weight^T, both int8 or both float8_e4m3fn, scaled, + bias: [M, out] in `dtype`.

    The weight has `scales` of blocks, or `factors` of rows.
    """
    floating, group = x.dtype == torch.float8_e4m3fn, 0 if scales is None else BLOCK
    weight = Arranged(codes, scales, None, 8, group, out_features, x.shape[1], floating, True, factors)
    return product(x, weight, bias, token_scale, dtype)


@narrow_linear.register_fake
def _(
    x: Tensor,
    token_scale: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    factors: Tensor | None,
    bias: Tensor | None,
    out: int,
    dtype: torch.dtype,
) -> Tensor:
    del token_scale, codes, scales, factors, bias
    return x.new_empty(x.shape[0], out, dtype=dtype)


@torch.library.custom_op("compress_llm::mixed_linear", mutates_args=())
def mixed_linear(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, out_features: int, floating: bool
) -> Tensor:
    """x [M, in], quantised to a scale a token and int8 or E4M3, times a 4-bit weight^T, + bias: [M, out] like `x`.

    One operator, because the number of tokens decides what is multiplied.
    """
    activation = Activation(E4M3 if floating else INT8)
    stored = Arranged(codes, scales, None, 4, BLOCK, out_features, x.shape[1])
    weight = as_multiplied(stored, activation, x.shape[0], x.dtype)
    given, token_scale = inputs(x, weight, activation)
    return product(given, weight, bias, token_scale, x.dtype)


@mixed_linear.register_fake
def _(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, out: int, floating: bool) -> Tensor:
    del codes, scales, bias, floating
    return x.new_empty(x.shape[0], out)


@torch.library.custom_op("compress_llm::quantize_tokens", mutates_args=())
def quantize_tokens(x: Tensor, input_scale: Tensor | None, floating: bool) -> tuple[Tensor, Tensor]:
    """x [M, in] as codes [M, in], int8 or float8_e4m3fn, and float32 scales [M].

    Rounded as `activations.activation_codes` does. The scales are one a token, found in `x`, or `input_scale` [1] for
    all of them.
    """
    name, x = _quantizer(x, floating), x.contiguous()
    if name == "cuda":
        return cuda_quantize(x, input_scale, floating)
    if name == "triton":
        from .triton_quantize import quantize

        early = torch.cuda.get_device_capability(x.device) >= (9, 0)
        return quantize(x, input_scale=input_scale, floating=floating, pdl=early)
    grid = E4M3 if floating else INT8
    kind = Activation(grid) if input_scale is None else Activation(grid, granularity="tensor", dynamic=False)
    codes, scale = activation_codes(x, kind, input_scale)
    return codes.to(_narrow(floating)), scale.float().view(-1).expand(x.shape[0]).contiguous()


@quantize_tokens.register_fake
def _(x: Tensor, input_scale: Tensor | None, floating: bool) -> tuple[Tensor, Tensor]:
    del input_scale
    return torch.empty_like(x, dtype=_narrow(floating)), x.new_empty(x.shape[0], dtype=torch.float32)


def _quantizer(x: Tensor, floating: bool) -> str:
    """The implementation that quantises `x` [M, in]: that of the product which follows, whatever its results are."""
    capability = torch.cuda.get_device_capability(x.device) if x.is_cuda else (0, 0)
    return pick(Problem(x.device.type, capability, x.shape[0], 1, x.shape[1], x.dtype, 8, 0, True, floating)).name


@torch.library.custom_op("compress_llm::quantize_blocks", mutates_args=())
def quantize_blocks(x: Tensor, group: int, floating: bool) -> tuple[Tensor, Tensor]:
    """x [M, in] as codes [M, in], int8 or float8_e4m3fn, and float32 scales: see `triton_quantize_blocks.quantize`."""
    if _quantizer(x, floating) != "reference":
        from .triton_quantize_blocks import quantize

        return quantize(x.contiguous(), group, floating, torch.cuda.get_device_capability(x.device) >= (9, 0))
    grid = E4M3 if floating else INT8
    kind = Activation(grid, "group", group_size=group) if group else Activation(grid)
    codes, scale = activation_codes(x, kind)
    codes, scale = codes.to(_narrow(floating)).view(x.shape), scale.float().flatten(1)
    if group == 0:
        return shuffled(codes), scale.view(-1)
    return codes, pad(scale, (0, 0, 0, pitch(x.shape[0]) - x.shape[0])).T.contiguous()


@quantize_blocks.register_fake
def _(x: Tensor, group: int, floating: bool) -> tuple[Tensor, Tensor]:
    size = (x.shape[1] // group, pitch(x.shape[0])) if group else (x.shape[0],)
    return torch.empty_like(x, dtype=_narrow(floating)), x.new_empty(size, dtype=torch.float32)


def _narrow(floating: bool) -> torch.dtype:
    return torch.float8_e4m3fn if floating else torch.int8


@torch.library.custom_op("compress_llm::round_inputs", mutates_args=())
def round_inputs(x: Tensor, given: Tensor | None, grid: str, group: int, coded: bool, scale_rule: str) -> Tensor:
    """x [M, in] rounded to codes and back: see `triton_round.quantize`."""
    from .triton_round import quantize

    early = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return quantize(x.contiguous(), grid, group, coded, given, scale_rule, early)


@round_inputs.register_fake
def _(x: Tensor, given: Tensor | None, grid: str, group: int, coded: bool, scale_rule: str) -> Tensor:
    del given, grid, group, coded, scale_rule
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def inputs(
    x: Tensor, weight: Arranged, activation: Activation | None = None, input_scale: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """What `product` with `weight` takes for inputs x [M, in] that are quantised as `activation` says.

    Codes and float32 scales of tokens where the weight is for 8-bit activations, which are scaled by what is found in
    each token, in 128 inputs of it where the weight has scales of blocks, or all by `input_scale` [1]; else `x` as
    rounded, and None.
    """
    if weight.narrow and weight.group:
        group = weight.group if weight.has_block_scales else 0
        return torch.ops.compress_llm.quantize_blocks(x, group, weight.floating)
    if weight.narrow:
        return torch.ops.compress_llm.quantize_tokens(x, input_scale, weight.floating)
    if activation is None:
        return x, None
    if x.is_cuda and x.dtype in (torch.float16, torch.bfloat16) and activation.granularity != "tensor":
        kind = (activation.grid.name, activation.group_size or 0, activation.scale_grid is not None)
        return torch.ops.compress_llm.round_inputs(x, input_scale, *kind, activation.scale_rule), None
    return quantize_activation(x, activation, input_scale), None


def apply(
    x: Tensor,
    weight: Arranged,
    bias: Tensor | None,
    activation: Activation | None = None,
    input_scale: Tensor | None = None,
) -> Tensor:
    """x [..., in] weight^T + bias for any kind of weight in fragment order: [..., out] in the dtype of `x`.

    `activation` and `input_scale` are as for `inputs`.
    """
    flat = x.reshape(-1, x.shape[-1])
    if activation is not None and is_mixed(weight, activation):
        floating = activation.grid.name == "e4m3"
        parts = (weight.codes, weight.scales, bias)
        y = torch.ops.compress_llm.mixed_linear(flat, *parts, weight.out_features, floating)
        return y.view(*x.shape[:-1], weight.out_features)
    flat, token_scale = inputs(flat, weight, activation, input_scale)
    if weight.narrow:
        parts = (weight.codes, weight.scales, weight.factors, bias)
        y = torch.ops.compress_llm.narrow_linear(flat, token_scale, *parts, weight.out_features, x.dtype)
    else:
        kind = (weight.bits, weight.group, weight.out_features, weight.floating)
        y = torch.ops.compress_llm.linear(flat, *weight.tensors, bias, *kind)
    return y.view(*x.shape[:-1], weight.out_features)
