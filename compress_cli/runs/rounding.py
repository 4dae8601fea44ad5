"""One linear from float weight to packed tensors, pruned or rounded or both, with the errors that the report shows.

What is measured, and what later layers see, is the weight as decoded from the packed tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...calibration.statistics import Stats, output_error
from ...formats.architectures import Architecture
from ...formats.errors import InputError
from ...formats.layout import has_input_scale
from ...formats.packings import NOTES, packing
from ...formats.pruned import Packable, Pruned
from ...formats.rounded import Rounded
from ...formats.scheme import Scheme
from ...kernels.hadamard import rotated
from ...quantizers.input_scales import input_scale
from ...quantizers.registry import ROUNDINGS
from ...quantizers.scales import resolve
from .against_source import relative_error
from .methods import Pick
from .plan import Layer
from .report import LayerRow

ROWS = 512  # of a weight that are held in float64 at a time


@dataclass(frozen=True)
class PackedLayer:
    """Tensors by checkpoint name, the report's row, and the decoded weight [out, in] as the checkpoint had it."""

    tensors: dict[str, Tensor]
    row: LayerRow
    decoded: Tensor


def round_layer(
    layer: Layer,
    pick: Pick,
    weight: Tensor,
    stats: Stats | None,
    dtype: torch.dtype,
    *,
    transformed: bool = False,
    peak: Tensor | None = None,
) -> PackedLayer:
    """Round `weight` (float32 [out, in]) as `pick` says and pack it; `dtype` is the checkpoint's, and that of scales.

    The weight of a rotated scheme is rotated first; `stats` are of inputs in that basis, and so are the errors.
    `peak` is the largest magnitude of all weights that have to agree with this one on what spans a tensor (`peaks`).

    A linear whose inputs no calibration token reached (an expert that was never chosen) is rounded to nearest or pruned
    by magnitude, and its row says so. Raises ValueError for a layer without a scheme.
    """
    if layer.scheme is None:
        raise ValueError(f"{layer.name} has no scheme")
    if stats is not None and stats.tokens == 0:
        stats, pick = None, _unseen(pick)
    scheme = layer.scheme
    weight = rotated(weight, scheme)
    result = _result(weight, scheme, pick, stats, dtype, peak)
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
        rotation=scheme.rotation,
        details={**pick.details, **_scale_details(pick, result), **notes},
    )
    back = rotated(decoded, scheme).to(dtype)
    return PackedLayer({f"{layer.name}.{suffix}": tensor for suffix, tensor in tensors.items()}, row, back)


def peaks(facts: Architecture, layers: Iterable[Layer], weight: Callable[[Layer], Tensor]) -> dict[str, Tensor]:
    """By name of linear the largest magnitude of it and all that engines fuse it with, where its scheme asks for that.

    `weight` gives the weight of a layer, of which one is held at a time.
    """
    spanning = {layer.name: layer for layer in layers if layer.scheme is not None and layer.scheme.spans_tensor}
    own: dict[str, Tensor] = {}
    for name, layer in spanning.items():
        scheme = layer.scheme
        found = weight(layer)
        turned = found if scheme is None else rotated(found.float(), scheme)
        own[name] = torch.stack(torch.aminmax(turned)).abs().amax()
    return {name: torch.stack([own[other] for other in facts.fused_names(name) if other in own]).amax() for name in own}


def _scale_details(pick: Pick, result: Packable) -> dict[str, Any]:
    """What the report says of scales, where there are any: the rules, and the global scale where there is one."""
    details: dict[str, Any] = {}
    if not isinstance(result, Rounded):
        return details
    if "scale_rule" in pick.options:
        details["scale_rule"] = resolve(pick.options["scale_rule"], result.scheme)
    if result.params.global_scale is not None:
        details["global_scale"] = float(result.params.global_scale)
    if result.scheme.input_rule is not None:
        details["input_scale_rule"] = result.scheme.input_rule
    return details


def _result(
    weight: Tensor, scheme: Scheme, pick: Pick, stats: Stats | None, dtype: torch.dtype, peak: Tensor | None
) -> Packable:
    if scheme.sparsity is None:
        return pick.rounding.function(weight, scheme, stats, dtype, pick.options, peak)
    if pick.pruning is None or pick.rounding.masked is None:
        raise ValueError(f"nothing prunes a linear of scheme {scheme.name}")
    pruned = pick.pruning.apply(weight, scheme.sparsity, pick.ratio, stats, dtype)
    if not scheme.rounds:
        return Pruned(scheme, pruned.to(dtype))
    return pick.rounding.masked(weight, pruned, scheme, stats, dtype, pick.options, peak)


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


def _input_scale(name: str, scheme: Scheme, stats: Stats | None, dtype: torch.dtype) -> Tensor | None:
    if stats is None or stats.abs_max is None or scheme.activation is None:
        raise InputError(name, "saw no calibration text, so the scale of its inputs is unknown", "give more --dataset")
    return input_scale(scheme.activation, stats.abs_max, dtype)
