"""The plan: from a recipe and the headers of a checkpoint to what will be written, exact to the byte where formats are.

Pure and fast: nothing is read beyond headers, nothing is written. Every user error that headers can show is raised
here, before any work starts. `--dry-run` prints the plan and stops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...formats.architectures import Architecture, architecture
from ...formats.checkpoint import Checkpoint
from ...formats.errors import InputError
from ...formats.layout import is_exact
from ...formats.packings import packing
from ...formats.scheme import AUTO_GROUPS, Scheme
from .patterns import matching
from .recipe import Recipe, Rule, resolved

Spec = tuple[torch.dtype, tuple[int, ...]]
Choice = Scheme | str  # a string says why the linear stays as it is
Fitted = Callable[[Scheme, int], Scheme]  # (scheme, inputs of a linear) -> the scheme as that linear gets it
QUANTIZABLE = (torch.bfloat16, torch.float16, torch.float32)
ROTATED = (
    "rotated inputs: transformers passes transform_config over and computes nonsense; load the output with "
    "compress_llm, with an engine that applies it (vLLM), or call compressed_tensors.transform.apply_transform_config"
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

    Raises InputError for an already quantised source, unsupported dtypes, patterns that match nothing, group sizes and
    rotations that do not divide, layers that engines fuse under different schemes, and a recipe that would quantise
    nothing.
    """
    if checkpoint.quantization is not None:
        raise InputError(
            str(checkpoint.directory), "is already quantised", "start from the original bf16, fp16 or fp32 checkpoint"
        )
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    facts = architecture(checkpoint.config, shapes)
    warnings = [] if facts.known else [f"unknown architecture {facts.name}: linears were found by name and shape"]
    sources = _sources(checkpoint, facts)
    chosen = _schemes(recipe, facts, sources, checkpoint)
    if fitted is not None:
        chosen = {
            name: fitted(choice, checkpoint.tensors[sources[name]].shape[1]) if isinstance(choice, Scheme) else choice
            for name, choice in chosen.items()
        }
    if any(isinstance(choice, Scheme) and choice.rotation for choice in chosen.values()):
        warnings.append(ROTATED)
    _check_fused(facts, chosen)
    _check_row_blocks(facts, chosen, {name: checkpoint.tensors[source].shape[0] for name, source in sources.items()})
    if not any(isinstance(choice, Scheme) for choice in chosen.values()):
        raise InputError("--ignore", "leaves nothing to quantise", "ignore fewer layers or name targets that exist")
    units = tuple(_units(checkpoint, facts, sources, chosen))
    return Plan(recipe, checkpoint, facts, units, tuple(warnings))


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


def _schemes(
    recipe: Recipe, facts: Architecture, sources: Mapping[str, str], checkpoint: Checkpoint
) -> dict[str, Choice]:
    names = [name for name in sources if name != facts.head]
    if recipe.lm_head is not None and facts.head not in sources:
        raise InputError(f"--lm-head {recipe.lm_head}", f"this model has no {facts.head}", "leave it out")
    if facts.head in recipe.targets:
        raise InputError(f"--target {facts.head}", "the head has a flag of its own", "use --lm-head SCHEME")
    targets = matching(recipe.targets, names, "--target") if recipe.targets else set(names)
    ignored = matching(recipe.ignore, sources, "--ignore") if recipe.ignore else set()
    by_rule: dict[str, Rule] = {}
    for rule in reversed(recipe.rules):
        by_rule.update(dict.fromkeys(matching([rule.target], names, "rules: target"), rule))
    chosen: dict[str, Choice] = {}
    for name in sources:
        width = checkpoint.tensors[sources[name]].shape[1]
        rule = by_rule.get(name)
        if name in ignored:
            chosen[name] = "ignored"
        elif name == facts.head:
            tied = sources[name] != f"{name}.weight"
            kept = "shares the embedding" if tied else "kept without --lm-head"
            head = recipe.lm_head and _fit(resolved(recipe.lm_head, None), recipe.group_size, name, width)
            chosen[name] = head or kept
        elif rule is not None:
            chosen[name] = _fit(resolved(rule.scheme, rule.symmetric), rule.group_size, name, width)
        elif name in targets:
            chosen[name] = _fit(*recipe.base_scheme(), name, width)
        else:
            chosen[name] = "not a target"
        _check_dtype(name, chosen[name], checkpoint.tensors[sources[name]].dtype)
    return chosen


def _fit(base: Scheme, group: int | str | None, name: str, width: int) -> Scheme:
    """The scheme with a group size that divides `width`. Raises InputError naming sizes that would."""
    if group == "auto":
        if not base.groupable:
            return _divided(base, name, width)
        fits = [size for size in AUTO_GROUPS if width % size == 0]
        return _divided(base.with_group(fits[0] if fits else "channel"), name, width)
    return _divided(base if group is None else base.with_group(group), name, width)  # type: ignore[arg-type]


def _divided(wanted: Scheme, name: str, width: int) -> Scheme:
    if wanted.sparsity is not None and wanted.sparsity.group is not None and width % wanted.sparsity.group[1]:
        cause = f"does not divide the {width} inputs of {name}"
        raise InputError(f"--pattern {wanted.sparsity.pattern}", cause, f"leave it out, or add --ignore {name}")
    if wanted.group_size is not None and width % wanted.group_size and not wanted.groupable:
        raise InputError(
            f"--scheme {wanted.name}",
            f"has blocks of {wanted.group_size}, which do not divide the {width} inputs of {name}",
            f"leave it out with --ignore {name}, or use another scheme",
        )
    if wanted.group_size is not None and width % wanted.group_size:
        would = [size for size in range(min(width, 256), 15, -1) if width % size == 0]
        listed = ", ".join(str(size) for size in would[:4])
        raise InputError(
            f"--group-size {wanted.group_size}",
            f"does not divide the {width} inputs of {name}",
            f"use {listed + ', ' if listed else ''}channel or auto",
        )
    return wanted


def _check_dtype(name: str, choice: Choice, dtype: torch.dtype) -> None:
    if isinstance(choice, Scheme) and dtype not in QUANTIZABLE:
        kind = str(dtype).removeprefix("torch.")
        raise InputError(f"{name}.weight", f"has dtype {kind}", "start from a bf16, fp16 or fp32 checkpoint")


def _check_row_blocks(facts: Architecture, chosen: Mapping[str, Choice], rows: Mapping[str, int]) -> None:
    """Blocks of rows must end where a linear ends that engines load as one matrix with others."""
    for name, choice in chosen.items():
        if isinstance(choice, Scheme) and rows[name] % choice.block_rows and len(facts.fused_names(name)) > 1:
            raise InputError(
                f"--scheme {choice.name}",
                f"has blocks of {choice.block_rows} rows, which do not divide the {rows[name]} outputs of {name}, and "
                "engines fuse it with others",
                "use another scheme",
            )


def _check_fused(facts: Architecture, chosen: Mapping[str, Choice]) -> None:
    """Engines load q/k/v and gate/up as one matrix: all of a group get the same scheme or none does."""
    for name, choice in chosen.items():
        for partner in facts.fused_names(name):
            if partner in chosen and _title(chosen[partner]) != _title(choice):
                raise InputError(
                    partner,
                    f"would get {_title(chosen[partner])} while {name} gets {_title(choice)}, and engines fuse the two",
                    "give both the same scheme, or ignore both",
                )


def _title(choice: Choice) -> str:
    if isinstance(choice, str):
        return "no scheme"
    return choice.name + (f" group {choice.group_size}" if choice.group_size else " per channel")


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
    return list(dict.fromkeys(kept))


def _may_be_linear(plan: Plan, tensor: str) -> bool:
    return tensor.endswith(".weight") and len(plan.checkpoint.tensors[tensor].shape) == 2
