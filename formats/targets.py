"""How `quantization_config` says which linears it means: the class name `Linear`, exact names, `re:` patterns.

Reading follows compressed-tensors: an exact name wins over a pattern (in alphabetical order) and a pattern over the
class. Writing never leans on that order, because engines differ in it: what is written for several groups is disjoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from .errors import InputError

T = TypeVar("T")
LINEAR = "Linear"
PATTERN = "re:"
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")
"""A part between dots that is a number: of a block or an expert, not the 1 of `w1`."""


def written(groups: Sequence[Sequence[str]], others: Iterable[str]) -> list[list[str]]:
    """Targets for each group of linear names, such that none matches a name of another group or of `others`.

    Names that differ in the numbers between dots only (the same linear of every block or expert) become one pattern
    where all of them are in one group, and stay exact names where they are not.
    """
    owners: dict[str, set[int]] = {}
    for index, names in enumerate([*groups, list(others)]):
        for name in names:
            owners.setdefault(_NUMBER.sub("0", name), set()).add(index)
    return [_targets(names, {kind for kind, owner in owners.items() if len(owner) == 1}) for names in groups]


def _targets(names: Sequence[str], whole: set[str]) -> list[str]:
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(_NUMBER.sub("0", name), []).append(name)
    targets: list[str] = []
    for kind, members in kinds.items():
        if len(members) > 1 and kind in whole:
            literal = (re.escape(part) for part in _NUMBER.split(members[0]))
            targets.append(f"{PATTERN}^{'[0-9]+'.join(literal)}$")
        else:
            targets.extend(members)
    return targets


def matched(targets: Mapping[str, T], ignored: Iterable[str], linears: Iterable[str]) -> dict[str, T]:
    """Linear -> what the target that means it maps to; linears that are ignored or that no target means are left out.

    Raises InputError for a pattern that does not compile and a target that names a class other than Linear.
    """
    names = list(linears)
    patterns = {text: _compiled(text, "targets") for text in sorted(targets) if text.startswith(PATTERN)}
    for text in targets.keys() - patterns.keys() - {LINEAR, *names}:
        if "." not in text:
            cause = f"'{text}' is neither a linear of this model nor the class {LINEAR}"
            raise InputError("quantization_config targets", cause, f"use {LINEAR}, exact names or {PATTERN} patterns")
    barred = set(ignored)
    barred_patterns = [_compiled(text, "ignore") for text in barred if text.startswith(PATTERN)]
    found: dict[str, T] = {}
    for name in names:
        if LINEAR in barred or name in barred or any(pattern.match(name) for pattern in barred_patterns):
            continue
        fitting = (text for text, pattern in patterns.items() if pattern.match(name))
        target = name if name in targets else next(fitting, LINEAR)
        if target in targets:
            found[name] = targets[target]
    return found


def _compiled(text: str, key: str) -> re.Pattern[str]:
    try:
        return re.compile(text.removeprefix(PATTERN))
    except re.error as error:
        cause = f"'{text}' is no regular expression ({error})"
        raise InputError(f"quantization_config {key}", cause, "correct it") from error
