"""One unit of a plan from source tensors to packed ones: read, check, transform, round, pack, measure.

The weights that later layers see are those decoded from the packed form, so what is calibrated is what is served.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...calibration.lanes import Stage
from ...calibration.statistics import Field, Stats, output_error
from ...formats.checkpoint import Checkpoint, TensorInfo
from ...formats.errors import InputError
from ...formats.packings import packing
from ...formats.scheme import Scheme
from ...formats.tensor_bytes import read_tensor
from .feeds import Heads, live_feeds
from .methods import Chain
from .plan import Layer, Plan, Unit
from .report import LayerRow

if TYPE_CHECKING:
    from ...calibration.stream import Block, Stream

Outputs = dict[str, Tensor | TensorInfo]


@dataclass
class Worker:
    """Works units off in order. `stream` is None when nothing is calibrated."""

    plan: Plan
    methods: Chain
    fields: frozenset[Field]
    stream: Stream | None
    device: str

    def unit(self, unit: Unit) -> tuple[Outputs, list[LayerRow]]:
        """Tensors to write for the unit, and a row a quantised linear. Raises InputError for NaN or Inf in a weight."""
        checkpoint = self.plan.checkpoint
        if unit.block is None and not any(layer.scheme for layer in unit.layers):
            for name in unit.kept:
                check_finite_on_disk(checkpoint, name)
            return {name: checkpoint.tensors[name] for name in unit.kept}, []
        if self.stream is None:
            return self._plain(unit)
        return self._calibrated(unit, self.stream)

    def replay(self, unit: Unit, written: Mapping[str, TensorInfo]) -> None:
        """Move the calibration states through a finished unit, from the tensors it was written as."""
        if self.stream is None or unit.block is None:
            return
        weights = {name: read_tensor(info, self.device) for name, info in written.items()}
        for layer in unit.layers:
            if layer.scheme is not None:
                parts = {name.removeprefix(f"{layer.name}."): weights.pop(name) for name in layer.outputs}
                rounded = packing(layer.scheme).unpack(parts, layer.scheme, layer.shape)
                weights[f"{layer.name}.weight"] = rounded.dequantize(self._dtype(layer))
        block = self.stream.block(unit.block, weights)
        self.stream.advance(block)
        self.stream.release(block)

    def _plain(self, unit: Unit) -> tuple[Outputs, list[LayerRow]]:
        checkpoint = self.plan.checkpoint
        for name in unit.kept:
            check_finite_on_disk(checkpoint, name)
        outputs: Outputs = {name: checkpoint.tensors[name] for name in unit.kept}
        rows = []
        for layer in unit.layers:
            if layer.scheme is not None:
                weight = check_finite(checkpoint.read(layer.source, device=self.device), layer.source).float()
                tensors, row, _ = self._round(layer, layer.scheme, weight, None, transformed=False)
                outputs.update(tensors)
                rows.append(row)
        return outputs, rows

    def _calibrated(self, unit: Unit, stream: Stream) -> tuple[Outputs, list[LayerRow]]:
        checkpoint = self.plan.checkpoint
        packed = {layer.source: layer for layer in unit.layers if layer.scheme is not None}
        names = [*unit.kept, *(source for source in packed if source not in unit.kept)]
        weights = {name: check_finite(checkpoint.read(name, device=self.device), name) for name in names}
        outputs: Outputs = {name: checkpoint.tensors[name] for name in unit.kept}
        rows: dict[str, LayerRow] = {}
        if unit.block is None:
            renamed = {f"{layer.name}.weight": weights.pop(layer.source) for layer in packed.values()}
            block = stream.head({**weights, **renamed})
            masters = {name: tensor.float() for name, tensor in renamed.items()}
        else:
            block = stream.block(unit.block, weights)
            masters = {name: tensor.float() for name, tensor in weights.items()}
        stats = self._transform(unit, block, stream, masters, weights, outputs)
        layers = {layer.name: layer for layer in unit.layers}

        def rounded(stage: Stage, seen: Stats, _inputs: list[Tensor]) -> Mapping[str, Tensor]:
            decoded: dict[str, Tensor] = {}
            for name in stage:
                layer = layers[name]
                if layer.scheme is not None:
                    weight = masters[f"{name}.weight"]
                    tensors, rows[name], decoded[name] = self._round(
                        layer, layer.scheme, weight, seen, transformed=stats is not None
                    )
                    outputs.update(tensors)
            return decoded

        if stats is not None and not self.methods.rounding.needs:
            for stage, seen in stats.items():
                stream.update(block, rounded(stage, seen, []))
            stream.advance(block)
        else:
            stream.advance_staged(block, rounded, self.methods.rounding_fields | self._extra_fields())
        stream.release(block)
        return outputs, [rows[layer.name] for layer in unit.layers if layer.name in rows]

    def _extra_fields(self) -> frozenset[Field]:
        static = any(_static(layer.scheme) for layer in self.plan.quantized)
        return frozenset({"second_moment", "abs_max"}) if static else frozenset({"second_moment"})

    def _transform(
        self,
        unit: Unit,
        block: Block,
        stream: Stream,
        masters: dict[str, Tensor],
        weights: Mapping[str, Tensor],
        outputs: Outputs,
    ) -> dict[Stage, Stats] | None:
        """Run the transforms over the block; returns the statistics they leave, None when there are none."""
        if not self.methods.transforms or unit.block is None:
            return None
        stats = stream.collect(block, self.methods.transform_fields | self._extra_fields())
        facts = self.plan.architecture
        prefix = f"{facts.layers}.{unit.block}."
        schemes = {layer.name: layer.scheme for layer in unit.layers}
        heads = Heads.of(self.plan.checkpoint.config)
        for transform, options in self.methods.transforms:
            for feed in live_feeds(facts, prefix, masters, schemes, stats, heads):
                if any(target.scheme for target in feed.targets):
                    transform.function(feed, self._dtype(unit.layers[0]), options)
        changed = {name: master for name, master in masters.items() if not torch.equal(master, weights[name].float())}
        kept = {name: master.to(weights[name].dtype) for name, master in changed.items() if name in outputs}
        outputs.update(kept)
        stream.update_tensors(changed | kept)
        return stats

    def _round(
        self, layer: Layer, scheme: Scheme, weight: Tensor, stats: Stats | None, *, transformed: bool
    ) -> tuple[dict[str, Tensor], LayerRow, Tensor]:
        dtype = self._dtype(layer)
        result = self.methods.rounding.function(weight, scheme, stats, dtype, self.methods.options)
        if _static(scheme):
            result = replace(result, input_scale=_input_scale(layer.name, scheme, stats, dtype))
        packer = packing(scheme)
        tensors = {suffix: tensor.cpu() for suffix, tensor in packer.pack(result).items()}
        decoded = packer.unpack(tensors, scheme, layer.shape).dequantize()
        row = _row(layer, scheme, self.methods.label(), weight, decoded, stats, transformed)
        return {f"{layer.name}.{suffix}": tensor for suffix, tensor in tensors.items()}, row, decoded.to(dtype)

    def _dtype(self, layer: Layer) -> torch.dtype:
        return self.plan.checkpoint.tensors[layer.source].dtype


def _row(
    layer: Layer,
    scheme: Scheme,
    method: str,
    weight: Tensor,
    decoded: Tensor,
    stats: Stats | None,
    transformed: bool,
) -> LayerRow:
    decoded = decoded.to(weight.device)
    error = weight - decoded
    relative = None
    if stats is not None and stats.second_moment is not None:
        whole = output_error(weight, stats.second_moment)
        relative = math.sqrt(max(output_error(error, stats.second_moment), 0.0) / whole) if whole > 0 else 0.0
    return LayerRow(
        name=layer.name,
        scheme=scheme.name,
        method=method,
        group_size=scheme.group_size,
        bits_per_weight=layer.bits_per_weight,
        bytes=layer.bytes_after,
        weight_error=relative_error(weight, decoded),
        output_error=relative,
        transformed=transformed,
    )


def relative_error(weight: Tensor, decoded: Tensor) -> float:
    """‖W − Ŵ‖ / ‖W‖ in float64 sums; 0 for a weight that is zero throughout."""
    norm = float(weight.double().square().sum())
    return math.sqrt(float((weight - decoded).double().square().sum()) / norm) if norm > 0 else 0.0


def _static(scheme: Scheme | None) -> bool:
    return scheme is not None and scheme.activation is not None and not scheme.activation.dynamic


def _input_scale(name: str, scheme: Scheme, stats: Stats | None, dtype: torch.dtype) -> Tensor:
    if stats is None or stats.abs_max is None or scheme.activation is None:
        raise InputError(name, "saw no calibration text, so its static input scale is unknown", "give --dataset")
    scale = stats.abs_max.amax().reshape(1) / scheme.activation.grid.reach
    return scale.to(dtype).clamp_(min=torch.finfo(dtype).tiny)


def check_finite(tensor: Tensor, name: str) -> Tensor:
    """The tensor itself. Raises InputError naming it when it holds NaN or Inf."""
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise InputError(name, "holds NaN or Inf", "repair the checkpoint; nothing was written")
    return tensor


def check_finite_on_disk(checkpoint: Checkpoint, name: str) -> None:
    """`check_finite` of a tensor that is only copied, a chunk at a time. Raises InputError."""
    dtype = checkpoint.tensors[name].dtype
    if dtype.is_floating_point and dtype.itemsize > 1:
        checkpoint.copy_bytes(name, lambda chunk: check_finite(torch.frombuffer(bytearray(chunk), dtype=dtype), name))
