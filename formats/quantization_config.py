"""`quantization_config`, the part of config.json that tells every engine which linear is stored under which scheme.

Written as compressed-tensors writes it, so that transformers, vLLM and SGLang read it without this package. Reading is
strict: whatever would change a number and is not understood here is refused, never skipped. A scheme is recognised by
building its arguments and comparing, so a row of the scheme table that can be written can be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from . import targets
from .errors import InputError, nearest
from .float_grids import ScaleGrid
from .grids import Grid, IntGrid
from .packings import PACKINGS
from .scheme import INPUT_RULES, SCHEMES, Activation, Scheme
from .transform_config import build_transforms, parse_transforms

METHOD = "compressed-tensors"
MIXED = "mixed-precision"
LAYOUT_VERSION = "0.20.1"
"""The release of compressed-tensors whose layouts these are."""

_READABLE_ORDERS = (None, False, "static", "weight")
_DECISIVE = ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "block_structure", "sparsity")
_PLAIN_RULE = "minmax"
_SETTINGS, _RULE = "observer_kwargs", "scale_rule"  # where compressed-tensors keeps what it does not know itself
_SOURCE = "quantization_config"
_AS_WRITTEN = "use a config.json as compressed-tensors writes it"


def build(
    schemes: Mapping[str, Scheme],
    ignored: Sequence[str],
    actorder: Literal["static"] | None = None,
    scale_rules: Mapping[str, str] | None = None,
) -> dict[str, object]:
    """The `quantization_config` of a model whose linears (by checkpoint module name) are stored under `schemes`.

    `ignored` names every linear that stays as it was. `actorder` "static" tells that groups were rounded in the order
    of their activations, and `scale_rules` by which rule scales were chosen, by name of scheme (the plain rule is left
    out); both are for people, no decoder needs them. One scheme for all is one group with the target
    Linear; several are one group each, told apart by exact names and patterns. Raises InputError when `schemes` is
    empty, or names a linear that is also ignored.
    """
    if not schemes:
        raise InputError("--ignore", "leaves nothing to quantise", "ignore fewer layers")
    both = sorted(set(schemes) & set(ignored))
    if both:
        raise InputError(both[0], "is both quantised and ignored", "take it off one of the two lists")
    members: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        members.setdefault(replace(scheme, rotation=None), []).append(name)
    named = [[targets.LINEAR]] if len(members) == 1 else targets.written(list(members.values()), ignored)
    formats = {scheme.packing for scheme in members}
    return {
        "quant_method": METHOD,
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else MIXED,
        "config_groups": {
            f"group_{index}": _group(scheme, names, actorder, (scale_rules or {}).get(scheme.name, _PLAIN_RULE))
            for index, (scheme, names) in enumerate(zip(members, named, strict=True))
        },
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": build_transforms(schemes, ignored),
        "version": LAYOUT_VERSION,
    }


def _group(scheme: Scheme, names: list[str], actorder: str | None, scale_rule: str) -> dict[str, object]:
    weights = _weight_arguments(scheme)
    if scale_rule != _PLAIN_RULE:
        weights["observer"] = scale_rule
    if actorder is not None and scheme.strategy == "group":
        weights["actorder"] = actorder
    return {
        "targets": names,
        "format": scheme.packing,
        "weights": weights,
        "input_activations": None if scheme.activation is None else _activation_arguments(scheme.activation),
        "output_activations": None,
    }


def _weight_arguments(scheme: Scheme) -> dict[str, object]:
    block = scheme.strategy == "block"
    arguments: dict[str, object] = {
        **_number(scheme.grid),
        "symmetric": scheme.symmetric,
        "strategy": scheme.strategy,
        "group_size": None if block else scheme.group_size,
        "dynamic": False,
        **_scale_dtype(scheme.scale_grid),
    }
    if block:
        arguments["block_structure"] = [scheme.block_rows, scheme.group_size]
    if not scheme.symmetric:
        arguments["zp_dtype"] = "torch.int8" if scheme.zero_dtype == "int" else None
    if scheme.sparsity is not None:
        arguments["sparsity"] = scheme.sparsity.as_dict()
    return arguments


def _activation_arguments(activation: Activation) -> dict[str, object]:
    arguments: dict[str, object] = {
        **_number(activation.grid),
        "symmetric": True,
        "strategy": "tensor_group" if activation.global_scale else activation.granularity,
        "group_size": activation.group_size,
        "dynamic": "local" if activation.global_scale else activation.dynamic,
        **_scale_dtype(activation.scale_grid),
    }
    if activation.calibrated is not None and not isinstance(activation.grid, IntGrid):
        arguments["observer"] = "static_minmax"
    if activation.scale_rule != INPUT_RULES[0]:
        arguments[_SETTINGS] = {_RULE: activation.scale_rule}
    return arguments


def _scale_dtype(grid: ScaleGrid | None) -> dict[str, object]:
    """What tells that scales are codes; numbers in the checkpoint's dtype need no word."""
    return {} if grid is None else {"scale_dtype": str(grid.dtype)}


def _number(grid: Grid) -> dict[str, object]:
    return {"num_bits": grid.bits, "type": "int" if isinstance(grid, IntGrid) else "float"}


def parse(config: Mapping[str, object], linears: Iterable[str]) -> dict[str, Scheme]:
    """Which of `linears` (checkpoint module names) is stored under which scheme; those left out are stored plain.

    `config` is the `quantization_config` mapping itself. Raises InputError for another quantisation method, a format or
    arguments that no scheme of the table has, and for anything else that would change the decoded numbers: quantised
    key-value caches or outputs, transforms that are not read, sparsity, columns stored in another order.
    """
    method = config.get("quant_method")
    if method != METHOD:
        cause = f"'{method}' checkpoints are not read"
        raise InputError(f"{_SOURCE} quant_method", cause, f"use a {METHOD} one, or the unquantised original")
    _refuse_extras(config)
    groups = _mapping(config.get("config_groups"), "config_groups")
    by_target: dict[str, Scheme] = {}
    for key, group in groups.items():
        place = f"config_groups.{key}"
        content = _mapping(group, place)
        scheme = _scheme(content, content.get("format") or config.get("format"), place)
        by_target.update(dict.fromkeys(_strings(content.get("targets"), f"{place}.targets"), scheme))
    ignored = config.get("ignore")
    names = list(linears)
    found = targets.matched(by_target, [] if ignored is None else _strings(ignored, "ignore"), names)
    for name, block in parse_transforms(config.get("transform_config"), names).items():
        if name not in found:
            cause = f"turns the inputs of {name}, which is stored plain"
            raise InputError(f"{_SOURCE} transform_config", cause, "use a checkpoint that turns packed linears only")
        found[name] = replace(found[name], rotation=block)
    return found


def _refuse_extras(config: Mapping[str, object]) -> None:
    status = config.get("quantization_status", "compressed")
    if status != "compressed":
        cause = f"is '{status}', so the weights are not stored as codes"
        raise InputError(f"{_SOURCE} quantization_status", cause, "save the checkpoint compressed")
    for key in ("kv_cache_scheme", "sparsity_config", "moe_sparsity_config"):
        if not _is_empty(config.get(key)):
            fix = f"use a checkpoint without {key}"
            raise InputError(f"{_SOURCE} {key}", "asks for something that is not read", fix)


def _is_empty(value: object) -> bool:
    """Whether nothing is asked for: absent, empty, a dense sparsity, or a mapping of empty mappings."""
    if isinstance(value, Mapping):
        return value.get("format") == "dense" or all(_is_empty(part) for part in value.values())
    return value is None or value == []


def _scheme(group: Mapping[str, object], layout: object, place: str) -> Scheme:
    """The scheme that a config group describes."""
    if not isinstance(layout, str) or layout not in PACKINGS:
        raise InputError(f"{_SOURCE} {place}.format", f"'{layout}' is not read", nearest(str(layout), PACKINGS))
    if group.get("output_activations") is not None:
        raise InputError(f"{_SOURCE} {place}.output_activations", "is not read", "use a checkpoint without it")
    weights = _mapping(group.get("weights"), f"{place}.weights")
    if weights.get("actorder") not in _READABLE_ORDERS:
        cause = f"'{weights.get('actorder')}' stores columns in another order, which is not read"
        raise InputError(f"{_SOURCE} {place}.weights.actorder", cause, "use a checkpoint with static order or none")
    inputs = group.get("input_activations")
    inputs = None if inputs is None else _mapping(inputs, f"{place}.input_activations")
    wanted, wanted_inputs = _decisive(weights), None if inputs is None else _decisive(inputs)
    for row in _candidates(layout, wanted):
        activation = None if row.activation is None else _activation_arguments(row.activation)
        if _agree(_weight_arguments(row), weights) and _agree(activation, inputs):
            key = f"{place}.input_activations"
            return row.with_input_rule(_input_rule(inputs, key), f"{_SOURCE} {key} {_RULE}")
    cause = f"no scheme stored as {layout} has weights {wanted} and inputs {wanted_inputs}"
    raise InputError(f"{_SOURCE} {place}", cause, "use one of " + ", ".join(SCHEMES))


def _input_rule(inputs: Mapping[str, object] | None, place: str) -> str | None:
    """By which rule the scales of inputs are chosen; None where nothing is said of it."""
    settings = None if inputs is None else inputs.get(_SETTINGS)
    rule = None if settings is None else _mapping(settings, f"{place}.{_SETTINGS}").get(_RULE)
    return None if rule is None else str(rule)


def _candidates(layout: str, wanted: Mapping[str, object]) -> Iterator[Scheme]:
    """Rows of the table with this layout, under the group size, symmetry and sparsity asked for, where they can take
    them."""
    size, symmetric, block = wanted["group_size"], wanted["symmetric"], wanted["block_structure"]
    if isinstance(block, list) and len(block) == 2:
        size = block[1]
    if not (size is None or isinstance(size, int)):
        return
    for row in SCHEMES.values():
        names = [name for name, packing in row.layouts.items() if packing == layout]
        if row.packing == layout or names:
            try:
                found = row.with_layout(names[0] if names else None).with_sparsity(*_sparsity(wanted["sparsity"]))
                yield found.with_group(size).with_symmetry(symmetric is not False)
            except InputError:
                continue


def _agree(ours: Mapping[str, object] | None, theirs: Mapping[str, object] | None) -> bool:
    """Whether two lists of arguments say the same; layouts imply the dtype of scales where a writer leaves it out."""
    if ours is None or theirs is None:
        return ours is theirs
    said = theirs.get("scale_dtype")
    return _decisive(ours) == _decisive(theirs) and (said is None or said == ours.get("scale_dtype"))


def _sparsity(value: object) -> tuple[float | None, str | None]:
    """Ratio and pattern; nonsense is no match for any row."""
    found = value if isinstance(value, Mapping) else {}
    ratio, pattern = found.get("ratio"), found.get("pattern")
    return ratio if isinstance(ratio, float) else None, pattern if isinstance(pattern, str) else None


def _decisive(arguments: Mapping[str, object]) -> dict[str, object]:
    """The arguments that decide what codes mean, with compressed-tensors' defaults filled in."""
    size = arguments.get("group_size")
    strategy = arguments.get("strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    plain: dict[str, object] = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
    defaults = {**plain, "block_structure": None, "sparsity": None}
    filled = {**defaults, **arguments, "strategy": strategy, "group_size": None if size == -1 else size}
    return {key: value.lower() if isinstance(value := filled[key], str) else value for key in _DECISIVE}


def _mapping(value: object, place: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise InputError(f"{_SOURCE} {place}", "is not a mapping", _AS_WRITTEN)
    return value


def _strings(value: object, place: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise InputError(f"{_SOURCE} {place}", "is not a list of names", _AS_WRITTEN)
    return value
