"""Which linear gets which scheme: rules, patterns and the head's own flag, with a group size that fits each linear.

Whatever a recipe gets wrong about a model is raised here: patterns that match nothing, groups that do not divide, and
mixtures that engines cannot load as one matrix.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from ...formats.architectures import Architecture
from ...formats.checkpoint import Checkpoint
from ...formats.errors import InputError
from ...formats.scheme import AUTO_GROUPS, Scheme
from .patterns import matching
from .recipe import Recipe, Rule, resolved

Choice = Scheme | str  # a string says why the linear stays as it is
QUANTIZABLE = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class _Asked:
    """A scheme and a group size as the recipe has them, and what the user would call the two."""

    scheme: Scheme
    group: int | str | None
    scheme_flag: str = "--scheme"
    group_flag: str = "--group-size"

    def fit(self, name: str, width: int, widths: Collection[int] = ()) -> Scheme:
        """The scheme with a group size that divides the `width` inputs of linear `name`. Raises InputError, naming
        sizes that would, and would `widths` of other linears."""
        if self.group == "auto":
            fits = [size for size in AUTO_GROUPS if width % size == 0]
            fitted = self.scheme.with_group(fits[0] if fits else "channel") if self.scheme.groupable else self.scheme
        elif self.group is None:
            fitted = self.scheme
        else:
            fitted = self.scheme.with_group(self.group, self.group_flag)  # type: ignore[arg-type]
        self._check(fitted, name, width, math.gcd(width, *widths))
        return fitted

    def _check(self, fitted: Scheme, name: str, width: int, common: int) -> None:
        pattern, size = fitted.sparsity, fitted.group_size
        if pattern is not None and pattern.group is not None and width % pattern.group[1]:
            cause = f"does not divide the {width} inputs of {name}"
            raise InputError(f"--pattern {pattern.pattern}", cause, f"leave it out, or add --ignore {name}")
        if size is None or width % size == 0:
            return
        key = f"{self.scheme_flag} {fitted.name}"
        if not fitted.groupable:
            cause = f"has blocks of {size}, which do not divide the {width} inputs of {name}"
            raise InputError(key, cause, f"leave it out with --ignore {name}, or use another scheme")
        would = [str(size) for size in range(min(common, 256), 15, -1) if common % size == 0][:4]
        sizes = ", ".join([*would, "channel"]) + " or auto"
        if self.group is None:
            cause = f"has groups of {size}, which do not divide the {width} inputs of {name}"
            raise InputError(key, cause, f"add {self.group_flag} {sizes}")
        raise InputError(f"{self.group_flag} {size}", f"does not divide the {width} inputs of {name}", f"use {sizes}")


def _of_rule(rule: Rule) -> _Asked:
    return _Asked(resolved(rule.scheme, rule.symmetric), rule.group_size, "rules: scheme", "rules: group_size")


def _of_head(recipe: Recipe, name: str) -> _Asked:
    """The head has no flag for its group size: it takes that of the others where its scheme has a choice."""
    found = resolved(name, None)
    return _Asked(found, recipe.group_size if found.groupable else None, "--lm-head")


def chosen_schemes(
    recipe: Recipe, facts: Architecture, sources: Mapping[str, str], checkpoint: Checkpoint
) -> dict[str, Choice]:
    """What becomes of every linear of `sources` (linear -> tensor of `checkpoint`). Raises InputError."""
    ignored = matching(recipe.ignore, sources, "--ignore") if recipe.ignore else set()
    _check_head(recipe, facts.head, sources, ignored)
    names = [name for name in sources if name != facts.head]
    targets = matching(recipe.targets, names, "--target") if recipe.targets else set(names)
    by_rule: dict[str, Rule] = {}
    for rule in reversed(recipe.rules):
        by_rule.update(dict.fromkeys(matching([rule.target], names, "rules: target"), rule))
    base = _Asked(*recipe.base_scheme())
    widths = {checkpoint.tensors[sources[name]].shape[1] for name in targets - ignored - by_rule.keys()}
    chosen: dict[str, Choice] = {}
    for name in sources:
        width = checkpoint.tensors[sources[name]].shape[1]
        if name in ignored:
            chosen[name] = "ignored"
        elif name == facts.head:
            kept = "kept without --lm-head" if sources[name] == f"{name}.weight" else "shares the embedding"
            chosen[name] = kept if recipe.lm_head is None else _of_head(recipe, recipe.lm_head).fit(name, width)
        elif name in by_rule:
            chosen[name] = _of_rule(by_rule[name]).fit(name, width)
        elif name in targets:
            chosen[name] = base.fit(name, width, widths)
        else:
            chosen[name] = "not a target"
        if isinstance(choice := chosen[name], Scheme):
            chosen[name] = recipe.ruled(choice)
        _check_dtype(name, chosen[name], checkpoint.tensors[sources[name]].dtype)
    return chosen


def _check_head(recipe: Recipe, head: str, linears: Collection[str], ignored: Collection[str]) -> None:
    if head in recipe.targets:
        raise InputError(f"--target {head}", "the head has a flag of its own", "use --lm-head SCHEME")
    if recipe.lm_head is None:
        return
    if head not in linears:
        raise InputError(f"--lm-head {recipe.lm_head}", f"this model has no {head}", "leave it out")
    if head in ignored:
        raise InputError(f"--lm-head {recipe.lm_head}", f"--ignore takes in {head}", "leave one of the two out")


def remarks(recipe: Recipe) -> Iterator[str]:
    """What the user may have expected of a recipe, and does not get."""
    asked = [_Asked(*recipe.base_scheme()), *map(_of_rule, recipe.rules)]
    for one in dict.fromkeys(asked):
        if one.group == "auto" and not one.scheme.groupable:
            yield f"{one.group_flag} auto changes nothing: scheme {one.scheme.name} has {one.scheme.span_text}"


def check_together(facts: Architecture, chosen: Mapping[str, Choice], rows: Mapping[str, int]) -> None:
    """Raise InputError where engines load linears as one matrix (q/k/v, gate/up) and their schemes do not allow it.

    All of such a group get the same scheme or none does, and blocks of rows end where a linear ends; `rows` is the
    number of outputs of each.
    """
    for name, choice in chosen.items():
        fused = facts.fused_names(name)
        for partner in fused:
            if partner in chosen and _title(chosen[partner]) != _title(choice):
                raise InputError(
                    partner,
                    f"would get {_title(chosen[partner])} while {name} gets {_title(choice)}, and engines fuse the two",
                    "give both the same scheme, or ignore both",
                )
        if isinstance(choice, Scheme) and rows[name] % choice.block_rows and len(fused) > 1:
            raise InputError(
                f"--scheme {choice.name}",
                f"has blocks of {choice.block_rows} rows, which do not divide the {rows[name]} outputs of {name}, and "
                "engines fuse it with others",
                "use another scheme",
            )


def _check_dtype(name: str, choice: Choice, dtype: torch.dtype) -> None:
    if isinstance(choice, Scheme) and dtype not in QUANTIZABLE:
        kind = str(dtype).removeprefix("torch.")
        raise InputError(f"{name}.weight", f"has dtype {kind}", "start from a bf16, fp16 or fp32 checkpoint")


def _title(choice: Choice) -> str:
    if isinstance(choice, str):
        return "no scheme"
    return choice.name + (f" group {choice.group_size}" if choice.group_size else " per channel")
