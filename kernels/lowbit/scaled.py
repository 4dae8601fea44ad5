"""Products of microscaled weights and activations as they lie, for GPUs that multiply such numbers themselves.

A packed linear keeps its tensors then. This has not run on such a GPU, so it never is the first choice: it runs where
it is asked for (`COMPRESS_KERNEL=scaled`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...formats.bits import pack_nibbles
from ...formats.scheme import Activation, Scheme
from ..activations import activation_codes, stored_input_scale
from .packed import pick_for
from .triton_scaled import Microscaled, gemm


def chosen(scheme: Scheme, shape: tuple[int, int], tokens: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a product with a weight (out, in) = `shape` of `scheme` runs here.

    Raises InputError where the environment asks for an implementation that cannot run.
    """
    return device.type == "cuda" and pick_for(scheme, shape, tokens, dtype, device).name == "scaled"


def product(x: Tensor, tensors: Mapping[str, Tensor], activation: Activation, bias: Tensor | None) -> Tensor:
    """x [..., in] weight^T + bias, [..., out] in the dtype of `x`; both operands have scales of groups, as codes.

    `tensors` are those of the checkpoint by suffix. Raises ValueError where `activation` has no such scales.
    """
    given = stored_input_scale(tensors)
    codes = tensors["weight_packed"] if "weight_packed" in tensors else tensors["weight"]
    factor = None
    if given is not None:
        factor = 1 / (given * tensors["weight_global_scale"])
    flat = x.reshape(-1, x.shape[-1])
    y = gemm(quantized(flat, activation, given), Microscaled(codes, tensors["weight_scale"]), factor, bias, x.dtype)
    return y.view(*x.shape[:-1], y.shape[-1])


def quantized(x: Tensor, activation: Activation, given: Tensor | None) -> Microscaled:
    """x [M, in] as codes and scales; `given` is the calibrated global scale of NVFP4's inputs, or None."""
    grid = activation.scale_grid
    if grid is None or grid.dtype is None:
        raise ValueError("these activations have no scales of groups that are codes")
    values, steps = activation_codes(x, activation, given)
    codes = activation.grid.encode(values.float().flatten(1))
    scales = grid.encode((steps if given is None else steps * given).float().flatten(1))
    packed = pack_nibbles(codes) if activation.grid.bits == 4 else codes.view(torch.float8_e4m3fn)
    return Microscaled(packed, scales.view(grid.dtype))
