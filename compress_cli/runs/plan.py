"""The plan: from a recipe and the headers of a checkpoint to what will be written, exact to the byte where formats are.

Pure and fast: nothing is read beyond headers, nothing is written. Every user error that headers can show is raised
here, before any work starts. `--dry-run` prints the plan and stops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from ...formats.architectures import Architecture, architecture
from ...formats.checkpoint import Checkpoint
from ...formats.errors import InputError
from ...formats.layout import is_exact
from ...formats.packings import packing
from ...formats.scheme import INPUT_RULES, Scheme
from .choices import Choice, check_together, chosen_schemes, remarks
from .recipe import Recipe
from .whole import check_whole

Spec = tuple[torch.dtype, tuple[int, ...]]
Fitted = Callable[[Scheme, int], Scheme]  # (scheme, inputs of a linear) -> the scheme as that linear gets it
ROTATED = (
    "rotated inputs: transformers passes transform_config over and computes nonsense; load the output with "
    "compress_llm, with an engine that applies it (vLLM), or call compressed_tensors.transform.apply_transform_config"
)
INPUTS_BY_MAX = (
    "--input-scale-rule: other engines choose the scales of inputs by the largest magnitude, and are less exact; "
    "compress_llm.load and compress eval-ppl keep the rule"
)
FP4_EXPERTS = (
    "NVFP4 experts: transformers 5.24 loads them without their weight_global_scale and computes nonsense; load the "
    "output with compress_llm, or choose MXFP4"
)


@dataclass(frozen=True)
class Layer:
    """One linear: what becomes of it and what it costs.

    `source` is the checkpoint tensor its weight comes from (the embedding for a tied head), `outputs` the tensors it is
    written as, `reason` why it stays as it is (None when `scheme` is set).
    """

    name: str
    source: str
    shape: tuple[int, int]
    scheme: Scheme | None
    reason: str | None
    bytes_before: int
    outputs: Mapping[str, Spec]

    @property
    def weights(self) -> int:
        """Number of weights."""
        return self.shape[0] * self.shape[1]

    @property
    def bytes_after(self) -> int:
        """Size of everything that is stored for this weight, see `exact`."""
        return sum(spec_bytes(spec) for spec in self.outputs.values())

    @property
    def exact(self) -> bool:
        """Whether the sizes are promises; those of a format that the data decide are what to expect."""
        return is_exact(self.outputs)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits over number of weights, scales and zero points included."""
        return 8 * self.bytes_after / self.weights


@dataclass(frozen=True)
class Unit:
    """What is read, changed and written together: a decoder block, or what lies before or after the blocks.

    `block` is the block's number or None; `kept` names source tensors that are copied byte for byte.
    """

    index: int
    label: str
    block: int | None
    layers: tuple[Layer, ...]
    kept: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Everything decided before the first weight is read."""

    recipe: Recipe
    checkpoint: Checkpoint
    architecture: Architecture
    units: tuple[Unit, ...]
    warnings: tuple[str, ...]

    @property
    def layers(self) -> list[Layer]:
        """Every linear of the model, in the order it is worked on."""
        return [layer for unit in self.units for layer in unit.layers]

    @property
    def quantized(self) -> list[Layer]:
        """The linears that get a scheme."""
        return [layer for layer in self.layers if layer.scheme is not None]

    @property
    def tensors(self) -> dict[str, Spec]:
        """Every tensor of the output with its dtype and shape, in the order it is written."""
        specs: dict[str, Spec] = {}
        for unit in self.units:
            for name in unit.kept:
                info = self.checkpoint.tensors[name]
                specs[name] = (info.dtype, info.shape)
            for layer in unit.layers:
                specs.update(layer.outputs)
        return specs

    @property
    def packs_head(self) -> bool:
        """Whether the head gets a packed weight of its own, and so can no longer share the embedding's."""
        return any(layer.name == self.architecture.head for layer in self.quantized)


def spec_bytes(spec: Spec) -> int:
    """Bytes of a tensor with this dtype and shape."""
    return spec[0].itemsize * math.prod(spec[1])


def make_plan(recipe: Recipe, checkpoint: Checkpoint, fitted: Fitted | None = None) -> Plan:
    """Decide for every tensor of `checkpoint` what becomes of it.

    `fitted` is what the methods make of a scheme for a linear (`Chain.fitted`).

    Raises InputError for an already quantised source, one that lacks tensors, unsupported dtypes, patterns that match
    nothing, group sizes and rotations that do not divide, layers that engines fuse under different schemes, and a
    recipe that would quantise nothing.
    """
    if checkpoint.quantization is not None:
        raise InputError(
            str(checkpoint.directory), "is already quantised", "start from the original bf16, fp16 or fp32 checkpoint"
        )
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    facts = architecture(checkpoint.config, shapes)
    warnings = [] if facts.known else [f"unknown architecture {facts.name}: linears were found by name and shape"]
    sources = _sources(checkpoint, facts)
    check_whole(checkpoint, facts, sources)
    chosen = chosen_schemes(recipe, facts, sources, checkpoint)
    warnings.extend(remarks(recipe))
    if fitted is not None:
        chosen = {
            name: fitted(choice, checkpoint.tensors[sources[name]].shape[1]) if isinstance(choice, Scheme) else choice
            for name, choice in chosen.items()
        }
    warnings.extend(_cautions({choice for choice in chosen.values() if isinstance(choice, Scheme)}, facts))
    check_together(facts, chosen, {name: checkpoint.tensors[source].shape[0] for name, source in sources.items()})
    if isinstance(chosen.get(facts.head), Scheme) and sources[facts.head] != f"{facts.head}.weight":
        warnings.append(f"--lm-head {recipe.lm_head}: it shares the embedding's weight, and is stored beside it")
    if not any(isinstance(choice, Scheme) for choice in chosen.values()):
        raise InputError("--ignore", "leaves nothing to quantise", "ignore fewer layers or name targets that exist")
    units = tuple(_units(checkpoint, facts, sources, chosen))
    return Plan(recipe, checkpoint, facts, units, tuple(warnings))


def _cautions(schemes: Set[Scheme], facts: Architecture) -> Iterator[str]:
    """What other engines make of these schemes."""
    if any(scheme.rotation for scheme in schemes):
        yield ROTATED
    if any(scheme.input_rule not in (None, INPUT_RULES[0]) for scheme in schemes):
        yield INPUTS_BY_MAX
    if facts.experts and any(scheme.packing == "nvfp4-pack-quantized" for scheme in schemes):
        yield FP4_EXPERTS


def _sources(checkpoint: Checkpoint, facts: Architecture) -> dict[str, str]:
    """Linear name -> the checkpoint tensor that holds its weight; the head last."""
    found = {
        name.removesuffix(".weight"): name
        for name, info in checkpoint.tensors.items()
        if facts.is_linear(name, info.shape)
    }
    ordered = dict(sorted(found.items(), key=lambda item: (*(facts.split(item[1]) or (0, ""))[:1], item[0])))
    head = f"{facts.head}.weight"
    if head in checkpoint.tensors:
        ordered[facts.head] = head
    elif checkpoint.config.get("tie_word_embeddings", True) and f"{facts.embedding}.weight" in checkpoint.tensors:
        ordered[facts.head] = f"{facts.embedding}.weight"
    return ordered


def _units(
    checkpoint: Checkpoint,
    facts: Architecture,
    sources: Mapping[str, str],
    chosen: Mapping[str, Choice],
) -> Iterator[Unit]:
    blocks: dict[int, list[str]] = {}
    before: list[str] = []
    after: list[str] = []
    tail = (f"{facts.final_norm}.", f"{facts.head}.")
    for name in checkpoint.tensors:
        place = facts.split(name)
        if place is not None:
            blocks.setdefault(place[0], []).append(name)
        else:
            (after if name.startswith(tail) else before).append(name)
    parts: list[tuple[str, int | None, list[str]]] = [("before the blocks", None, before)]
    parts += [(f"block {number}", number, blocks[number]) for number in sorted(blocks)]
    parts.append(("after the blocks", None, after))
    for index, (label, number, names) in enumerate(parts):
        head_here = index == len(parts) - 1 and facts.head in sources
        here = set(names)
        linears = [name for name in sources if sources[name] in here and name != facts.head]
        layers = [_layer(name, checkpoint, sources[name], chosen[name]) for name in linears + [facts.head] * head_here]
        packed = {layer.source for layer in layers if layer.scheme is not None and layer.bytes_before}
        yield Unit(index, label, number, tuple(layers), tuple(sorted(here - packed)))


def _layer(name: str, checkpoint: Checkpoint, source: str, choice: Choice) -> Layer:
    info = checkpoint.tensors[source]
    tied = source != f"{name}.weight"
    before = 0 if tied else info.nbytes
    shape = (info.shape[0], info.shape[1])
    if isinstance(choice, str):
        outputs: dict[str, Spec] = {} if tied else {source: (info.dtype, info.shape)}
        return Layer(name, source, shape, None, choice, before, outputs)
    layout = packing(choice).layout(choice, *shape, info.dtype)
    return Layer(
        name, source, shape, choice, None, before, {f"{name}.{suffix}": spec for suffix, spec in layout.items()}
    )


def ignored_modules(plan: Plan) -> Sequence[str]:
    """Linear modules that stay unquantised (routers included), as `quantization_config.ignore` lists them."""
    kept = [layer.name for layer in plan.layers if layer.scheme is None]
    routers = {name for feed in plan.architecture.feeds for name in feed.also}
    for unit in plan.units:
        for tensor in unit.kept:
            place = plan.architecture.split(tensor)
            router = place is not None and place[1].removesuffix(".weight") in routers
            if router or (not plan.architecture.known and _may_be_linear(plan, tensor)):
                kept.append(tensor.removesuffix(".weight"))
    if not plan.architecture.known and plan.architecture.head not in (layer.name for layer in plan.layers):
        kept.append(plan.architecture.head)  # as transformers calls most, though it may be tied or have another name
    return list(dict.fromkeys(kept))


def _may_be_linear(plan: Plan, tensor: str) -> bool:
    return tensor.endswith(".weight") and len(plan.checkpoint.tensors[tensor].shape) == 2
