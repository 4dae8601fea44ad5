"""The product with a weight in fragment order, by whichever implementation the registry picks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from ...formats.errors import InputError
from ...formats.scheme import Activation
from ..cuda.arrivals import arrivals
from ..registry import Pick, Problem, pick
from .configs import NARROW_TOKENS, configuration
from .cuda_decode import DecodeConfig, decode
from .cuda_gemm import GemmConfig, gemm
from .layout import BLOCK, Arranged, dequantize, unfactored
from .narrow import values

WIDE = {torch.float16, torch.bfloat16}
"""Types of activations that a weight may be arranged for."""


def problem(weight: Arranged, tokens: int, dtype: torch.dtype) -> Problem:
    """What the registry is asked for a product of `weight` with `tokens` tokens and results of `dtype`."""
    device = weight.codes.device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    shape = (weight.out_features, weight.in_features)
    return Problem(
        device.type, capability, tokens, *shape, dtype, weight.bits, weight.group, weight.narrow, weight.floating
    )


def picked(weight: Arranged, tokens: int, dtype: torch.dtype, asked: str | None = None) -> Pick:
    """The implementation that `product` runs, and why. Raises InputError where the one asked for cannot."""
    return pick(problem(weight, tokens, dtype), asked)


def as_multiplied(weight: Arranged, activation: Activation | None, tokens: int, dtype: torch.dtype) -> Arranged:
    """`weight` for a product with so many tokens whose inputs are quantised as `activation` says.

    The same tensors, but for 8-bit activations where that is faster and a kernel here reads them so.
    """
    if activation is None or not is_mixed(weight, activation) or tokens < NARROW_TOKENS:
        return weight
    if picked(weight, tokens, dtype).name != "cuda":
        return weight
    return replace(weight, narrow=True, floating=activation.grid.name == "e4m3")


def is_mixed(weight: Arranged, activation: Activation) -> bool:
    """Whether weights of 4 bits and activations of 8 can be multiplied as 8-bit numbers."""
    if activation.grid.bits != 8 or activation.granularity != "token":
        return False
    return weight.bits == 4 and weight.group == BLOCK and weight.zeros is None and not weight.floating


def product(
    x: Tensor,
    weight: Arranged,
    bias: Tensor | None,
    token_scale: Tensor | None,
    dtype: torch.dtype,
    asked: str | None = None,
    pdl: bool = True,
) -> Tensor:
    """x [M, in] weight^T + bias as [M, out] in `dtype`.

    `x` is of `dtype`, or int8 or float8_e4m3fn with `token_scale` float32 where the weight wants that: [M], or [blocks,
    `narrow.pitch(M)`] where it has scales of blocks itself. `pdl` lets a kernel start before its predecessor in the
    stream has finished. Raises InputError for an implementation that is asked for and cannot run, and for a dtype that
    a GPU's kernels do not have the weight in.
    """
    name = picked(weight, x.shape[0], dtype, asked).name
    scales = weight.scales
    if name != "reference" and scales is not None and scales.dtype in WIDE - {dtype}:
        cause = f"the weights were arranged for {scales.dtype}"
        raise InputError(f"activations of {dtype}", cause, "load the model with the dtype it is to run in")
    if x.shape[0] == 0:
        return x.new_empty(0, weight.out_features, dtype=dtype)
    x, bias = x.contiguous(), None if bias is None else bias.to(dtype)
    if name == "cuda":
        y = torch.empty(x.shape[0], weight.out_features, dtype=dtype, device=x.device)
        with torch.cuda.device(x.device):
            run(x, weight, y, configuration(weight, x.shape[0], x.device), bias, token_scale, pdl)
        return y
    if name == "triton":
        from . import triton_gemm, triton_narrow

        if token_scale is not None:
            return triton_narrow.gemm(x, token_scale, weight, bias, dtype)
        return triton_gemm.gemm(x, weight, bias)
    return reference(x, weight, bias, token_scale, dtype)


def reference(
    x: Tensor, weight: Arranged, bias: Tensor | None, token_scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The same in plain torch. Sums of 8-bit activations are exact: in float64, which holds every one of them."""
    if token_scale is None:
        return linear(x, dequantize(weight, dtype), bias)
    if weight.factors is None:
        stored = weight if weight.bits == 8 else replace(weight, narrow=False, floating=False)
        y = (values(x, token_scale, weight.bits) @ dequantize(stored).double().T).float()
    else:
        codes = unfactored(weight).double()
        y = (x.to(torch.float64) @ codes.T).float() * (token_scale[:, None] * weight.factors[None, :])
    return (y if bias is None else y + bias.float()).to(dtype)


def run(
    x: Tensor,
    weight: Arranged,
    y: Tensor,
    config: DecodeConfig | GemmConfig,
    bias: Tensor | None = None,
    token_scale: Tensor | None = None,
    pdl: bool = True,
) -> None:
    """One CUDA kernel under a given configuration; see `decode` and `gemm`."""
    if x.data_ptr() % 16:
        x = x.clone()  # the copy engine reads from 16-byte boundaries
    if isinstance(config, DecodeConfig):
        decode(x, weight, y, config, bias, pdl)
        return
    counters = config.counters(weight, x.shape[0])
    gemm(x, weight, y, config, bias, token_scale, arrivals(x.device, counters) if counters else None, pdl)
