"""One linear from float weight to packed tensors, pruned or rounded or both, with the errors that the report shows.

What is measured, and what later layers see, is the weight as decoded from the packed tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...calibration.statistics import Stats, output_error
from ...formats.errors import InputError
from ...formats.layout import has_input_scale
from ...formats.packings import NOTES, packing
from ...formats.pruned import Packable, Pruned
from ...formats.rounded import Rounded
from ...formats.scheme import Scheme
from ...quantizers.registry import ROUNDINGS
from .against_source import relative_error
from .methods import Pick
from .plan import Layer
from .report import LayerRow

ROWS = 512  # of a weight that are held in float64 at a time


@dataclass(frozen=True)
class PackedLayer:
    """Tensors by checkpoint name, the report's row, and the decoded weight [out, in] in the checkpoint's dtype."""

    tensors: dict[str, Tensor]
    row: LayerRow
    decoded: Tensor


def round_layer(
    layer: Layer, pick: Pick, weight: Tensor, stats: Stats | None, dtype: torch.dtype, *, transformed: bool = False
) -> PackedLayer:
    """Round `weight` (float32 [out, in]) as `pick` says and pack it; `dtype` is the checkpoint's, and that of scales.

    A linear whose inputs no calibration token reached (an expert that was never chosen) is rounded to nearest or pruned
    by magnitude, and its row says so. Raises ValueError for a layer without a scheme.
    """
    if layer.scheme is None:
        raise ValueError(f"{layer.name} has no scheme")
    if stats is not None and stats.tokens == 0:
        stats, pick = None, _unseen(pick)
    scheme = layer.scheme
    result = _result(weight, scheme, pick, stats, dtype)
    if isinstance(result, Rounded) and has_input_scale(scheme):
        result = replace(result, input_scale=_input_scale(layer.name, scheme, stats, dtype))
    packer = packing(scheme)
    tensors = {suffix: tensor.cpu() for suffix, tensor in packer.pack(result).items()}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    notes = NOTES[packer.name](tensors) if packer.name in NOTES else {}
    decoded = packer.unpack(tensors, scheme, layer.shape).dequantize().to(weight.device)
    row = LayerRow(
        name=layer.name,
        scheme=scheme.name,
        method=pick.label,
        group_size=scheme.group_size,
        bits_per_weight=8 * nbytes / layer.weights,
        bytes=nbytes,
        weight_error=relative_error(zip(weight.split(ROWS), decoded.split(ROWS), strict=True)),
        output_error=_relative_output_error(weight, decoded, stats),
        transformed=transformed,
        details={**pick.details, **notes},
    )
    return PackedLayer({f"{layer.name}.{suffix}": tensor for suffix, tensor in tensors.items()}, row, decoded.to(dtype))


def _result(weight: Tensor, scheme: Scheme, pick: Pick, stats: Stats | None, dtype: torch.dtype) -> Packable:
    if scheme.sparsity is None:
        return pick.rounding.function(weight, scheme, stats, dtype, pick.options)
    if pick.pruning is None or pick.rounding.masked is None:
        raise ValueError(f"nothing prunes a linear of scheme {scheme.name}")
    pruned = pick.pruning.apply(weight, scheme.sparsity, pick.ratio, stats, dtype)
    if not scheme.rounds:
        return Pruned(scheme, pruned.to(dtype))
    return pick.rounding.masked(weight, pruned, scheme, stats, dtype, pick.options)


def _unseen(pick: Pick) -> Pick:
    nearest = ROUNDINGS["rtn"]
    pruning = None if pick.pruning is None else pick.pruning.without_statistics()
    done, label = ("rounded to nearest", "rtn") if pruning is None else ("pruned by magnitude", "magnitude")
    details = {**pick.details, "note": f"no calibration token reached this layer; {done}"}
    return Pick(label, nearest, {**nearest.options, "scale_rule": "mse"}, details, pruning, pick.ratio)


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
