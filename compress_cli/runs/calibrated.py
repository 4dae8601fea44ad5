"""One unit with calibration text flowing through it: statistics, transforms, then rounding stage by stage.

The float32 masters of the unit's weights are what transforms rewrite and roundings take; the modules of the stream hold
what has been decided so far, so each stage sees its inputs as the finished model will produce them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...calibration.lanes import Stage
from ...calibration.statistics import Field, Stats
from ...formats.headers import TensorInfo
from ...formats.layout import has_input_scale
from .auto import Auto
from .feeds import Heads, live_feeds
from .finite import check_finite
from .methods import Chain
from .plan import Plan, Unit
from .report import LayerRow
from .rounding import peaks, round_layer

if TYPE_CHECKING:
    from ...calibration.blocks import Block
    from ...calibration.stream import Stream

Outputs = dict[str, Tensor | TensorInfo]


class CalibratedUnit:
    """The work on one unit. Raises InputError for NaN or Inf in a weight when it is made."""

    def __init__(
        self, plan: Plan, methods: Chain, stream: Stream, unit: Unit, device: str, ratios: Mapping[str, float]
    ) -> None:
        self._plan, self._methods, self._stream, self._unit = plan, methods, stream, unit
        self._layers = {layer.name: layer for layer in unit.layers}
        checkpoint = plan.checkpoint
        self._outputs: Outputs = {name: checkpoint.tensors[name] for name in unit.kept}
        self._rows: dict[str, LayerRow] = {}
        self._changed: frozenset[str] = frozenset()  # names of masters that a transform has rewritten
        self._picks = {
            layer.name: methods.pick(layer.scheme, ratios.get(layer.name))
            for layer in unit.layers
            if layer.scheme is not None
        }
        sources = {layer.source for layer in unit.layers if layer.scheme is not None}
        stored = {
            name: check_finite(checkpoint.read(name, device=device), name) for name in sorted({*unit.kept, *sources})
        }
        if unit.block is None:  # the head, which may take its weight from the embedding
            head = next(layer for layer in unit.layers if layer.scheme is not None)
            stored = {f"{head.name}.weight" if name == head.source else name: stored[name] for name in stored}
        self._stored = stored
        self._masters = {name: tensor.float() for name, tensor in stored.items()}
        self._rotations = {
            layer.name: layer.scheme.rotation for layer in unit.layers if layer.scheme and layer.scheme.rotation
        }
        self._dtype = checkpoint.tensors[unit.layers[0].source].dtype

    def run(self) -> tuple[Outputs, list[LayerRow]]:
        """Tensors to write, and a row a quantised linear; the stream's states have moved through the unit."""
        stream, number = self._stream, self._unit.block
        block = stream.head(self._stored) if number is None else stream.block(number, self._stored)
        stats = None if number is None else self._transform(block, number)
        settled = not self._methods.rounding.needs and not self._methods.auto and not self._rotations
        if stats is not None and settled:
            for stage, seen in stats.items():
                stream.update(block, self._round(stage, seen))
            stream.advance(block)
        else:
            stream.advance_staged(
                block, lambda stage, seen, _inputs: self._round(stage, seen), self._fields(), self._rotations
            )
        stream.release(block)
        return self._outputs, [self._rows[name] for name in self._layers if name in self._rows]

    def _fields(self) -> frozenset[Field]:
        """What is measured of every stage: the rounding's needs, the output error's, a static scale's."""
        static = any(layer.scheme is not None and has_input_scale(layer.scheme) for layer in self._layers.values())
        wanted: frozenset[Field] = frozenset({"second_moment", "abs_max"} if static else {"second_moment"})
        return wanted | self._methods.rounding_fields

    def _transform(self, block: Block, number: int) -> dict[Stage, Stats] | None:
        """Run the transforms, or choose methods; returns the statistics that transforms leave, None without any."""
        if not self._methods.transforms and not self._methods.auto:
            return None
        fields = self._methods.transform_fields | self._fields()
        facts, schemes = self._plan.architecture, {name: layer.scheme for name, layer in self._layers.items()}
        prefix, heads = f"{facts.layers}.{number}.", Heads.of(self._plan.checkpoint.config)
        if self._methods.auto:
            stats = self._stream.collect(block, fields, "fit")
            held = self._stream.collect(block, fields, "held")
            self._picks |= Auto(facts, prefix, schemes, heads, self._dtype).picks(self._masters, stats, held)
        else:
            stats = self._stream.collect(block, fields)
            for transform, options in self._methods.transforms:
                for feed in live_feeds(facts, prefix, self._masters, schemes, stats, heads):
                    if any(target.scheme is not None for target in feed.targets):
                        record = transform.function(feed, self._dtype, options)
                        self._note(transform.name, [target.name for target in feed.targets], record)
        self._install_changes()
        return stats

    def _note(self, transform: str, names: list[str], record: dict[str, object]) -> None:
        for name in names:
            if name in self._picks:
                pick = self._picks[name]
                details = {**pick.details, transform: record}
                self._picks[name] = replace(pick, details=details)

    def _install_changes(self) -> None:
        """Put what transforms changed into the modules, and into the outputs what is stored unquantised."""
        changed = {
            name: master
            for name, master in self._masters.items()
            if not torch.equal(master, self._stored[name].float())
        }
        self._changed = frozenset(changed)
        kept = {name: master.to(self._stored[name].dtype) for name, master in changed.items() if name in self._outputs}
        self._outputs.update(kept)
        self._stream.update_tensors({**changed, **kept})

    def _round(self, stage: Stage, seen: Stats) -> Mapping[str, Tensor]:
        """Round the linears of a stage; returns their decoded weights."""
        decoded: dict[str, Tensor] = {}
        layers = [self._layers[name] for name in stage]
        shared = peaks(self._plan.architecture, layers, lambda layer: self._masters[f"{layer.name}.weight"])
        for name in stage:
            layer, weight = self._layers[name], f"{name}.weight"
            if layer.scheme is not None:
                packed = round_layer(
                    layer,
                    self._picks[name],
                    self._masters[weight],
                    seen,
                    self._dtype,
                    transformed=weight in self._changed,
                    peak=shared.get(name),
                )
                self._outputs.update(packed.tensors)
                self._rows[name], decoded[name] = packed.row, packed.decoded
        return decoded
