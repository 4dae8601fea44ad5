"""What a run is asked to do: one object, whether it came from flags, a YAML file or Python.

A recipe is plain data and its dictionary form is what the report, the journal and the model card show, so a run can be
repeated from any of them. Unknown keys are refused with the nearest known one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from ...formats.errors import InputError, nearest
from ...formats.scheme import Scheme, scheme


@dataclass(frozen=True)
class Rule:
    """Another scheme for the linears that `target` matches; rules are tried in order before the recipe's own scheme."""

    target: str
    scheme: str
    group_size: int | str | None = None
    symmetric: bool | None = None


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the bytes of an output, apart from the model, the machine and the versions.

    `method` is a comma separated list: any number of transforms or a sparsifier, then one rounding; None is the
    scheme's own. `scale_rule` chooses scales of weights, `input_scale_rule` those of inputs, wherever a scheme has the
    choice. `sparsity`, `pattern` and `sparse_layout` change sparse schemes (None: as the scheme has it); `allocate`
    names how the ratio differs between layers, `refit` fits what pruning left. `group_size` is a number, "channel",
    "auto" (the largest of 128, 64, 32 that divides each layer, else channel) or None for the scheme's own.
    Patterns are a checkpoint name, a glob, or `re:` and a regular expression. `dataset` None means that nothing is
    calibrated unless a method or scheme needs it, and then the embedded text is used.
    """

    scheme: str = "W4A16"
    method: str | None = None
    group_size: int | str | None = None
    symmetric: bool | None = None
    scale_rule: str | None = None
    input_scale_rule: str | None = None
    sparsity: float | None = None
    pattern: str | None = None
    sparse_layout: str | None = None
    allocate: str | None = None
    refit: bool = False
    targets: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    lm_head: str | None = None
    rules: tuple[Rule, ...] = ()
    dataset: str | None = None
    num_samples: int = 128
    seq_len: int = 512
    batch_size: int = 8
    seed: int = 0
    dtype: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("num_samples", "seq_len", "batch_size"):
            if getattr(self, name) < 1:
                flag = f"--{name.replace('_', '-')} {getattr(self, name)}"
                raise InputError(flag, "must be at least 1", "give a positive number")
        if not 0 <= self.seed < 1 << 63:
            raise InputError(f"--seed {self.seed}", "is out of range", "give a number from 0 to 2^63 - 1")
        if self.dataset == "":
            raise InputError("--dataset ''", "is empty", "name a source of text, or leave it out")
        check_group_size(self.group_size)
        base = scheme(self.scheme)
        base.with_sparsity(self.sparsity, self.pattern).with_layout(self.sparse_layout)
        named = [base]
        for rule in self.rules:
            named.append(scheme(rule.scheme, "rules: scheme"))
            check_group_size(rule.group_size, "rules: group_size")
        if self.lm_head is not None:
            named.append(scheme(self.lm_head, "--lm-head"))
        next((row for row in named if row.input_rule is not None), base).with_input_rule(self.input_scale_rule)

    @property
    def methods(self) -> tuple[str, ...]:
        """The method names in order, lower case; the scheme's own where none is named."""
        named = scheme(self.scheme).method if self.method is None else self.method
        return tuple(part.strip().lower() for part in named.split(",") if part.strip())

    def base_scheme(self) -> tuple[Scheme, int | str | None]:
        """The scheme of every linear without a rule, and the group size asked for."""
        found = resolved(self.scheme, self.symmetric)
        return found.with_sparsity(self.sparsity, self.pattern).with_layout(self.sparse_layout), self.group_size

    def ruled(self, row: Scheme) -> Scheme:
        """`row`, the scheme of any linear, with the rule of its inputs where it has the choice."""
        return row if row.input_rule is None else row.with_input_rule(self.input_scale_rule)

    def as_dict(self) -> dict[str, Any]:
        """JSON form; `from_dict` of it is an equal recipe."""
        data = asdict(self)
        data.update(targets=list(self.targets), ignore=list(self.ignore), rules=[asdict(rule) for rule in self.rules])
        data["options"] = dict(self.options)
        return data


def resolved(name: str, symmetric: bool | None) -> Scheme:
    """The preset with the symmetry asked for."""
    row = scheme(name)
    if symmetric is not None and not row.rounds:
        flag = "--sym" if symmetric else "--asym"
        raise InputError(flag, f"scheme {row.name} rounds no weights", "leave it out")
    return row if symmetric is None else row.with_symmetry(symmetric)


def check_group_size(value: int | str | None, flag: str = "--group-size") -> None:
    """Raise InputError, blaming `flag`, unless `value` is a positive number, "channel", "auto" or None."""
    if value in (None, "channel", "auto") or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return
    raise InputError(f"{flag} {value}", "is not a group size", "give a positive number, channel or auto")


def from_dict(data: Mapping[str, Any], origin: str = "recipe") -> Recipe:
    """A recipe from its dictionary form (a YAML file, a report). Raises InputError for unknown keys and wrong types."""
    if not isinstance(data, Mapping):
        raise InputError(origin, "is not a mapping of keys to values", "write lines such as 'scheme: W4A16'")
    checked = _checked(data, Recipe, origin)
    rules = checked.get("rules", ())
    if isinstance(rules, str) or not isinstance(rules, Sequence):
        raise InputError(f"{origin}: rules", "is not a list", "write one '- target: … scheme: …' entry a rule")
    checked["rules"] = tuple(rule if isinstance(rule, Rule) else _rule(rule, origin) for rule in rules)
    for name in ("targets", "ignore"):
        value = checked.get(name, ())
        checked[name] = (value,) if isinstance(value, str) else tuple(value)
        if not all(isinstance(item, str) for item in checked[name]):
            raise InputError(f"{origin}: {name}", "holds something that is no pattern", "write a list of strings")
    return Recipe(**checked)


def _rule(data: Any, origin: str) -> Rule:
    if not isinstance(data, Mapping):
        raise InputError(f"{origin}: rules", "an entry is not a mapping", "write 'target:' and 'scheme:' in each")
    checked = _checked(data, Rule, f"{origin}: rules")
    for name in ("target", "scheme"):
        if name not in checked:
            raise InputError(f"{origin}: rules", f"an entry has no {name}", f"add '{name}:' to it")
    return Rule(**checked)


_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("scheme", "method", "scale_rule", "lm_head", "dataset", "dtype", "target"), (str,)),
    **dict.fromkeys(("pattern", "sparse_layout", "allocate", "input_scale_rule"), (str,)),
    "sparsity": (float,),
    "refit": (bool,),
    **dict.fromkeys(("num_samples", "seq_len", "batch_size", "seed"), (int,)),
    "symmetric": (bool,),
    "group_size": (int, str),
    "targets": (list, tuple, str),
    "ignore": (list, tuple, str),
    "options": (dict,),
}


_WORDS: dict[type, str] = {
    str: "text",
    float: "a number such as 0.5",
    int: "a whole number",
    bool: "true or false",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
}


def _checked(data: Mapping[str, Any], kind: type, origin: str) -> dict[str, Any]:
    known = [item.name for item in fields(kind)]
    checked: dict[str, Any] = {}
    for key, value in data.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise InputError(f"{origin}: {key}", "no recipe key has this name", nearest(str(key), known))
        if name in checked:
            raise InputError(f"{origin}: {key}", "is given twice", "write it once")
        types = _TYPES.get(name)
        if (
            value is not None
            and types
            and (not isinstance(value, types) or (isinstance(value, bool) != (bool in types)))
        ):
            wanted = " or ".join(dict.fromkeys(_WORDS[kind] for kind in types))
            fix = "put it in quotes" if types == (str,) else "correct the value"
            raise InputError(f"{origin}: {key}", f"was read as {value!r}, where {wanted} belongs", fix)
        checked[name] = value
    return {name: value for name, value in checked.items() if value is not None}


class _Once(yaml.SafeLoader):
    """YAML in which a key that is given twice is an error, not the last of the two."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"'{twice}' is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def load(path: Path) -> Recipe:
    """The recipe in a YAML file. Raises InputError for a file that is missing, not YAML or not a recipe."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Once)
    except OSError as error:
        raise InputError(f"--recipe {path}", f"cannot be read ({error.strerror})", "give a readable file") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no such date, no such number
        raise InputError(f"--recipe {path}", f"is not valid YAML ({error})", "correct the file") from error
    return from_dict({} if data is None else data, f"--recipe {path}")


def override(recipe: Recipe, given: Mapping[str, Any]) -> Recipe:
    """The recipe with the settings that were given on the command line (None means not given)."""
    changes = {name: value for name, value in given.items() if value is not None and value != ()}
    return replace(recipe, **changes)
