"""The stream of blocks: one decoder block in memory at a time, with the calibration states that flow through it.

The skeleton of the model (shapes, rotary tables, masks) comes from transformers with its weights on the meta device;
a block's weights are read from the checkpoint when its turn comes and dropped after it. Hidden states are kept on the
host in the model's dtype, so peak memory is one block plus the activations, whatever the number of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ..formats.architectures import Architecture
from ..formats.checkpoint import Checkpoint
from ..formats.errors import InputError
from ..formats.progress import Track, silent
from ..kernels.hadamard import rotate
from ..kernels.names import module_name, names_of
from ..kernels.skeleton import empty_model, read_config
from .blocks import Block, Look, layer_runner, stages_of, watched
from .lanes import Stage, StagedRun
from .statistics import Field, Stats
from .tokenizer import check_ids
from .windows import Windows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Part = Literal["all", "fit", "held"]
OnStage = Callable[[Stage, Stats, list[Tensor]], Mapping[str, Tensor]]


@dataclass
class _Batch:
    hidden: Tensor
    keep: Tensor | None
    arguments: list[dict[str, Any]]


class Stream:
    """Runs a checkpoint block by block over calibration windows.

    Parameters: `dtype` is what blocks compute in; `batch_size` windows go through a block together.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        facts: Architecture,
        windows: Windows,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        batch_size: int = 8,
        trust_remote_code: bool = False,
    ) -> None:
        self._checkpoint, self._facts = checkpoint, facts
        self._device, self._dtype = torch.device(device), dtype
        config = read_config(checkpoint.directory, trust_remote_code=trust_remote_code)
        check_ids([windows.ids], config.get_text_config().vocab_size)
        self._model = empty_model(config, dtype, attn_implementation=None, trust_remote_code=trust_remote_code)
        self._model.config.use_cache = False
        self._windows, self._batch_size = windows, batch_size
        self._batches: list[_Batch] = []
        self._stages: dict[Stage, list[Stage]] = {}
        self._layers: nn.ModuleList = self._model.get_submodule(facts.layers)  # type: ignore[assignment]
        count = facts.count_blocks(checkpoint.tensors)
        if len(self._layers) != count:
            cause = f"config.json has {len(self._layers)} layers and the checkpoint {count}"
            raise InputError(str(checkpoint.directory), cause, "correct num_hidden_layers")
        self._host_dtype = next(info.dtype for name, info in checkpoint.tensors.items() if facts.split(name))

    def start(self, track: Track = silent) -> None:
        """Embed the windows and record what the model passes to each block."""
        outside = self._place_outside()
        recorded: list[tuple[Tensor, dict[str, Any]]] = []
        saved = [layer.forward for layer in self._layers]
        for layer in self._layers:
            layer.forward = _recorder(recorded)  # type: ignore[method-assign]
        body = self._model.base_model
        try:
            with torch.no_grad():
                for ids, keep in track(self._slices(), "embedding calibration text", self._count()):
                    recorded.clear()
                    mask = None if keep is None else keep.to(self._device, torch.long)
                    body(input_ids=ids.to(self._device), attention_mask=mask, use_cache=False)
                    hidden = recorded[0][0].to("cpu", self._host_dtype)
                    self._batches.append(_Batch(hidden, keep, [arguments for _, arguments in recorded]))
        finally:
            for layer, forward in zip(self._layers, saved, strict=True):
                layer.forward = forward  # type: ignore[method-assign]
            for module in outside:
                module.to("meta")

    def block(self, number: int, weights: Mapping[str, Tensor]) -> Block:
        """Decoder block `number` with `weights` (checkpoint name -> tensor) in place on the stream's device."""
        module = self._layers[number]
        self._assign(self._model, weights)
        self._check_whole(module)
        prefix = f"{self._facts.layers}.{number}."
        block = Block(module, self._linears(prefix, weights), [], layer_runner(module, number))
        block.stages = self._find_stages(block, prefix)
        return block

    def head(self, weights: Mapping[str, Tensor]) -> Block:
        """The final norm and the head (its weight, maybe the embedding's, in `weights` under the head's own name)."""
        self._assign(self._model, weights)
        norm = self._model.get_submodule(self._facts.final_norm)
        head = self._model.get_submodule(self._facts.head)
        self._check_whole(norm, head)
        return Block(
            nn.ModuleList([norm, head]),
            {self._facts.head: head},
            [(self._facts.head,)],
            lambda hidden, _arguments: head(norm(hidden)),
        )

    def update(self, block: Block, weights: Mapping[str, Tensor]) -> None:
        """Replace weights of the block's linears, by linear name."""
        for name, weight in weights.items():
            block.linears[name].weight = nn.Parameter(weight.to(self._device, self._dtype), requires_grad=False)

    def update_tensors(self, weights: Mapping[str, Tensor]) -> None:
        """Replace tensors of the block in place, by checkpoint name."""
        self._assign(self._model, weights)

    def release(self, block: Block) -> None:
        """Drop the block's weights."""
        block.module.to("meta")

    def collect(
        self, block: Block, wanted: Iterable[Field], part: Part = "all", rotations: Mapping[str, int] | None = None
    ) -> dict[Stage, Stats]:
        """Input statistics of every stage with the block's present weights; the states do not move on.

        `part` "held" is every fourth batch (of two, the second), "fit" the others. A stage whose first linear is in
        `rotations` gets statistics of its inputs rotated in blocks of that many.
        """
        fields, turns = frozenset(wanted), rotations or {}
        stats = {stage: Stats() for stage in block.stages}
        keep: list[Tensor | None] = [None]
        looks = {stage[0]: _observer(stats[stage], fields, keep, turns.get(stage[0])) for stage in block.stages}
        with watched(block.linears, looks):
            for number, batch in enumerate(self._batches):
                held = number % 4 == 3 or (len(self._batches) < 4 and number == len(self._batches) - 1)
                if part == "all" or held == (part == "held"):
                    keep[0] = batch.keep
                    self._forward(block, batch)
        return stats

    def look(self, block: Block) -> list[Tensor]:
        """What the block makes of the states, a tensor a batch; the states do not move on."""
        return [self._forward(block, batch) for batch in self._batches]

    def advance(self, block: Block) -> None:
        """Move the states through the block with its present weights."""
        for batch in self._batches:
            batch.hidden = self._forward(block, batch)

    def advance_staged(
        self,
        block: Block,
        on_stage: OnStage,
        wanted: Iterable[Field],
        rotations: Mapping[str, int] | None = None,
    ) -> None:
        """Move the states on while `on_stage` replaces the weights of each stage once its inputs are known.

        `on_stage(stage, stats, inputs)` returns new weights by linear name. The states that flow on, also inside the
        block, have seen the new weights. A block whose batches reach its linears unevenly (experts) is run twice: once
        for the statistics of all its linears, once with the new weights. Linears named in `rotations` get statistics of
        their inputs rotated in blocks of that many; a stage of which only some are is handed over in parts.
        """
        fields, turns = frozenset(wanted), rotations or {}
        if self._facts.experts:
            for stage, stats in self.collect(block, fields, rotations=turns).items():
                self.update(block, on_stage(stage, stats, []))
            self.advance(block)
            return

        def reached(number: int, inputs: list[Tensor]) -> None:
            parts: dict[int | None, list[str]] = {}
            for name in block.stages[number]:
                parts.setdefault(turns.get(name), []).append(name)
            for turn, names in parts.items():
                stats = Stats()
                for batch, x in zip(self._batches, inputs, strict=True):
                    stats.add(_turned(x, turn), fields, None if batch.keep is None else batch.keep.to(x.device))
                self.update(block, on_stage(tuple(names), stats, inputs))

        staged = StagedRun(block.linears, block.stages, reached)
        with torch.no_grad():
            results = staged.run([_call(self._forward, block, batch) for batch in self._batches])
        for batch, result in zip(self._batches, results, strict=True):
            batch.hidden = result

    def _forward(self, block: Block, batch: _Batch) -> Tensor:
        with torch.no_grad():
            hidden = batch.hidden.to(self._device, self._dtype)
            return block.run(hidden, batch.arguments).to("cpu", self._host_dtype)

    def _slices(self) -> Iterable[tuple[Tensor, Tensor | None]]:
        ids, keep = self._windows.ids, self._windows.keep
        for start in range(0, ids.shape[0], self._batch_size):
            rows = slice(start, start + self._batch_size)
            yield ids[rows], None if keep is None else keep[rows]

    def _count(self) -> int:
        return -(-self._windows.ids.shape[0] // self._batch_size)

    def _place_outside(self) -> set[nn.Module]:
        """Read what lies outside the blocks, the head apart: embeddings, norms. Returns the modules that hold it."""
        head = self._model.get_output_embeddings()
        owners: set[nn.Module] = set()
        for name in self._checkpoint.tensors:
            path = names_of(self._model).path(name)
            if path is None or self._facts.split(name) is not None:
                continue
            owner = self._model.get_submodule(path.rpartition(".")[0])
            if owner is not head:
                self._assign(self._model, {name: self._checkpoint.read(name)})
                owners.add(owner)
        return owners

    def _assign(self, model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
        for name, tensor in weights.items():
            if names_of(model).ignored(name):
                continue
            path, _, leaf = module_name(model, name).rpartition(".")
            owner = model.get_submodule(path)
            moved = tensor.to(self._device, self._dtype if tensor.is_floating_point() else tensor.dtype)
            expected = getattr(owner, leaf, None)
            if isinstance(expected, Tensor) and expected.shape != moved.shape:
                cause = f"is {list(moved.shape)} where config.json asks for {list(expected.shape)}"
                raise InputError(name, cause, "correct config.json, or the checkpoint")
            if leaf in owner._parameters:
                setattr(owner, leaf, nn.Parameter(moved, requires_grad=False))
            elif leaf in owner._buffers:
                owner._buffers[leaf] = moved
            else:
                raise InputError(name, "has no place in this architecture", "check config.json against the checkpoint")

    def _check_whole(self, *modules: nn.Module) -> None:
        """Raise InputError where a parameter of the modules has not been given: it would compute with nothing."""
        empty = next((part for module in modules for part in module.parameters() if part.is_meta), None)
        if empty is not None:
            name = next(name for name, part in self._model.named_parameters() if part is empty)
            raise InputError(name, "is missing from the checkpoint", "complete it")

    def _linears(self, prefix: str, weights: Mapping[str, Tensor]) -> dict[str, nn.Module]:
        found: dict[str, nn.Module] = {}
        for name, tensor in weights.items():
            if name.startswith(prefix) and self._facts.is_linear(name, tuple(tensor.shape)):
                module = self._model.get_submodule(module_name(self._model, name).removesuffix(".weight"))
                if isinstance(module, nn.Linear):
                    found[name.removesuffix(".weight")] = module
        return found

    def _find_stages(self, block: Block, prefix: str) -> list[Stage]:
        """Which linears share an input, found by looking once a kind of block: a run that notes the input of each."""
        if self._facts.experts or not self._batches:
            return [(name,) for name in block.linears]
        inner = tuple(name.removeprefix(prefix) for name in block.linears)
        if inner not in self._stages:
            found = stages_of(block.linears, lambda: self._forward(block, self._batches[0]))
            self._stages[inner] = [tuple(name.removeprefix(prefix) for name in stage) for stage in found]
        return [tuple(prefix + name for name in stage) for stage in self._stages[inner]]


def _recorder(recorded: list[tuple[Tensor, dict[str, Any]]]) -> Callable[..., Tensor]:
    def record(hidden_states: Tensor, **arguments: Any) -> Tensor:
        recorded.append((hidden_states, arguments))
        return hidden_states

    return record


def _observer(stats: Stats, fields: frozenset[Field], keep: list[Tensor | None], turn: int | None) -> Look:
    def observe(x: Tensor) -> None:
        mask = keep[0]
        fits = mask is not None and x.shape[:-1] == mask.shape
        stats.add(_turned(x, turn), fields, mask.to(x.device) if fits and mask is not None else None)

    return observe


def _turned(x: Tensor, block: int | None) -> Tensor:
    return x if block is None else rotate(x, block)


def _call(function: Callable[[Block, _Batch], Tensor], block: Block, batch: _Batch) -> Callable[[], Tensor]:
    return lambda: function(block, batch)
