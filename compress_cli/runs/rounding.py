"""One linear from float weight to packed tensors, with the errors that the report shows.

What is measured, and what later layers see, is the weight as decoded from the packed tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...calibration.statistics import Stats, output_error
from ...formats.errors import InputError
from ...formats.layout import has_input_scale
from ...formats.packings import packing
from ...formats.scheme import Scheme
from ...kernels.hadamard import rotated
from ...quantizers.method import Rounding
from ...quantizers.registry import ROUNDINGS
from .against_source import relative_error
from .plan import Layer
from .report import LayerRow

ROWS = 512  # of a weight that are held in float64 at a time


@dataclass(frozen=True)
class Pick:
    """How one linear is rounded: `label` as the report names it, `details` what the report says of the choice."""

    label: str
    rounding: Rounding
    options: Mapping[str, Any]
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PackedLayer:
    """Tensors by checkpoint name, the report's row, and the decoded weight [out, in] as the checkpoint had it."""

    tensors: dict[str, Tensor]
    row: LayerRow
    decoded: Tensor


def round_layer(
    layer: Layer, pick: Pick, weight: Tensor, stats: Stats | None, dtype: torch.dtype, *, transformed: bool = False
) -> PackedLayer:
    """Round `weight` (float32 [out, in]) as `pick` says and pack it; `dtype` is the checkpoint's, and that of scales.

    The weight of a rotated scheme is rotated first; `stats` are of inputs in that basis, and so are the errors. A
    linear whose inputs no calibration token reached (an expert that was never chosen) is rounded to nearest, and its
    row says so. Raises ValueError for a layer without a scheme.
    """
    if layer.scheme is None:
        raise ValueError(f"{layer.name} has no scheme")
    if stats is not None and stats.tokens == 0:
        stats, pick = None, _unseen(pick)
    scheme = layer.scheme
    weight = rotated(weight, scheme)
    result = pick.rounding.function(weight, scheme, stats, dtype, pick.options)
    if has_input_scale(scheme):
        result = replace(result, input_scale=_input_scale(layer.name, scheme, stats, dtype))
    packer = packing(scheme)
    tensors = {suffix: tensor.cpu() for suffix, tensor in packer.pack(result).items()}
    decoded = packer.unpack(tensors, scheme, layer.shape).dequantize().to(weight.device)
    row = LayerRow(
        name=layer.name,
        scheme=scheme.name,
        method=pick.label,
        group_size=scheme.group_size,
        bits_per_weight=layer.bits_per_weight,
        bytes=layer.bytes_after,
        weight_error=relative_error(zip(weight.split(ROWS), decoded.split(ROWS), strict=True)),
        output_error=_relative_output_error(weight, decoded, stats),
        transformed=transformed,
        rotation=scheme.rotation,
        details=pick.details,
    )
    back = rotated(decoded, scheme).to(dtype)
    return PackedLayer({f"{layer.name}.{suffix}": tensor for suffix, tensor in tensors.items()}, row, back)


def _unseen(pick: Pick) -> Pick:
    nearest = ROUNDINGS["rtn"]
    details = {**pick.details, "note": "no calibration token reached this layer; rounded to nearest"}
    return Pick("rtn", nearest, {**nearest.options, "scale_rule": "mse"}, details)


def _relative_output_error(weight: Tensor, decoded: Tensor, stats: Stats | None) -> float | None:
    if stats is None or stats.second_moment is None:
        return None
    whole = output_error(weight, stats.second_moment)
    return math.sqrt(max(output_error(weight - decoded, stats.second_moment), 0.0) / whole) if whole > 0 else 0.0


def _input_scale(name: str, scheme: Scheme, stats: Stats | None, dtype: torch.dtype) -> Tensor:
    if stats is None or stats.abs_max is None or scheme.activation is None:
        raise InputError(name, "saw no calibration text, so its static input scale is unknown", "give more --dataset")
    scale = stats.abs_max.amax().reshape(1) / scheme.activation.grid.reach
    return scale.to(dtype).clamp_(min=torch.finfo(dtype).tiny)
