"""One unit of a plan from source tensors to packed ones: with calibration text flowing through it, or without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...formats.headers import TensorInfo
from ...formats.packings import packing
from ...formats.tensor_bytes import read_tensor
from ...kernels.hadamard import rotated
from .calibrated import CalibratedUnit, Outputs
from .finite import check_finite, check_finite_on_disk
from .methods import Chain
from .plan import Layer, Plan, Unit
from .report import LayerRow
from .rounding import peaks, round_layer

if TYPE_CHECKING:
    from ...calibration.stream import Stream


@dataclass
class Worker:
    """Works units off in order. `stream` is None when nothing is calibrated; `ratios` are shares of dropped weights of
    sparse linears that have one of their own."""

    plan: Plan
    methods: Chain
    stream: Stream | None
    device: str
    ratios: Mapping[str, float] = field(default_factory=dict)

    def unit(self, unit: Unit) -> tuple[Outputs, list[LayerRow]]:
        """Tensors to write for the unit, and a row a quantised linear. Raises InputError for NaN or Inf in a weight."""
        if self.stream is not None and any(layer.scheme for layer in unit.layers):
            return CalibratedUnit(self.plan, self.methods, self.stream, unit, self.device, self.ratios).run()
        checkpoint = self.plan.checkpoint
        for name in unit.kept:
            check_finite_on_disk(checkpoint, name)
        outputs: Outputs = {name: checkpoint.tensors[name] for name in unit.kept}
        rows = []
        shared = peaks(self.plan.architecture, unit.layers, self._weight)
        for layer in unit.layers:
            if layer.scheme is not None:
                weight, pick = self._weight(layer).float(), self.methods.pick(layer.scheme)
                packed = round_layer(layer, pick, weight, None, self._dtype(layer), peak=shared.get(layer.name))
                outputs.update(packed.tensors)
                rows.append(packed.row)
        if self.stream is not None and unit.block is not None:  # a block of which nothing is quantised
            self._advance(unit, {name: checkpoint.tensors[name] for name in unit.kept})
        return outputs, rows

    def replay(self, unit: Unit, written: Mapping[str, TensorInfo]) -> None:
        """Move the calibration states through a finished unit, from the tensors it was written as."""
        if self.stream is not None and unit.block is not None:
            self._advance(unit, written)

    def _advance(self, unit: Unit, written: Mapping[str, TensorInfo]) -> None:
        if self.stream is None or unit.block is None:
            return
        weights = {name: read_tensor(info, self.device) for name, info in written.items()}
        for layer in unit.layers:
            if layer.scheme is not None:
                parts = {name.removeprefix(f"{layer.name}."): weights.pop(name) for name in layer.outputs}
                rounded = packing(layer.scheme).unpack(parts, layer.scheme, layer.shape)
                weights[f"{layer.name}.weight"] = rotated(rounded.dequantize(), layer.scheme).to(self._dtype(layer))
        block = self.stream.block(unit.block, weights)
        self.stream.advance(block)
        self.stream.release(block)

    def _weight(self, layer: Layer) -> Tensor:
        return check_finite(self.plan.checkpoint.read(layer.source, device=self.device), layer.source)

    def _dtype(self, layer: Layer) -> torch.dtype:
        return self.plan.checkpoint.tensors[layer.source].dtype
