"""Experts as linears of their own, because that is how they lie on disk, are quantised and are served.

transformers fuses the experts of a layer into two three-dimensional parameters. A model that is to be quantised or run
packed needs the separate projections back: one module for each that the checkpoint names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

Activation = Callable[[Tensor], Tensor]
GATE_UP, DOWN = "gate_up_proj", "down_proj"


@dataclass(frozen=True)
class Projections:
    """What the checkpoint calls the three projections of an expert: down(act(gate(x)) · up(x))."""

    gate: str
    up: str
    down: str


class Expert(nn.Module):
    """One gated feed-forward network with its linears under the names of the checkpoint, uninitialised on meta."""

    def __init__(self, width: int, inner: int, names: Projections, act: Activation, dtype: torch.dtype) -> None:
        super().__init__()
        self._names, self.act_fn = names, act
        for name, inputs, outputs in ((names.gate, width, inner), (names.up, width, inner), (names.down, inner, width)):
            self.add_module(name, nn.Linear(inputs, outputs, bias=False, device="meta", dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, width] to [tokens, width]."""
        gate, up, down = (self.get_submodule(name) for name in (self._names.gate, self._names.up, self._names.down))
        return down(self.act_fn(gate(x)) * up(x))


class Experts(nn.ModuleList):
    """The experts of a layer, called like the fused module they replace."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of the chosen experts' outputs.

        `hidden_states` [tokens, width]; `top_k_index` int64 [tokens, k] and `top_k_weights` [tokens, k] as the router
        gives them. An expert that nothing is routed to is not run.
        """
        total = torch.zeros_like(hidden_states)
        for number in top_k_index.unique().tolist():
            token, choice = torch.where(top_k_index == number)
            output = self[number](hidden_states[token]) * top_k_weights[token, choice, None]
            total.index_add_(0, token, output.to(total.dtype))
        return total


def separate_experts(model: PreTrainedModel) -> None:
    """Replace every fused experts module of `model` that checkpoints store as one linear a projection.

    What is stored fused, or computes anything but the plain gated network, is left alone.
    """
    names = _projections(model)
    if names is None:
        return
    for path, module in list(model.named_modules()):
        if _is_plain(module):
            model.set_submodule(path, _separate(module, names))


def _projections(model: PreTrainedModel) -> Projections | None:
    """The names by which transformers' own converters gather the fused parameters, None where it gathers none."""
    gathered: dict[str, list[str]] = {}
    for entry in get_model_conversion_mapping(model):
        if isinstance(entry, WeightConverter) and len(entry.target_patterns) == 1:
            steps = [type(step) for step in entry.operations]
            target = entry.target_patterns[0].rpartition(".")[2]
            if steps in ([MergeModulelist], [MergeModulelist, Concatenate]):
                gathered[target] = [
                    pattern.removesuffix(".weight").rpartition(".")[2] for pattern in entry.source_patterns
                ]
    gate_up, down = gathered.get(GATE_UP, []), gathered.get(DOWN, [])
    return Projections(*gate_up, *down) if (len(gate_up), len(down)) == (2, 1) else None


def _is_plain(module: nn.Module) -> bool:
    """Whether `module` holds [experts, 2·inner, width] and [experts, width, inner] weights and gates by default."""
    parameters = dict(module.named_parameters(recurse=False))
    if parameters.keys() != {GATE_UP, DOWN} or any(weight.ndim != 3 for weight in parameters.values()):
        return False
    gate = getattr(type(module), "_apply_gate", None)
    altered = gate is not None and gate.__name__ != "_default_apply_gate"
    unusual = getattr(module, "is_transposed", False) or getattr(module, "has_post_expert_norm", False)
    return not altered and not unusual and callable(getattr(module, "act_fn", None))


def _separate(module: nn.Module, names: Projections) -> Experts:
    down = module.get_parameter(DOWN)
    count, width, inner = down.shape
    act = cast(Activation, module.act_fn)
    return Experts(Expert(width, inner, names, act, down.dtype) for _ in range(count))
