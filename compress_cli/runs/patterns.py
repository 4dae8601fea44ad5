"""Name patterns of `--target`, `--ignore` and recipe rules: a checkpoint name, a glob, or `re:` and an expression."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from ...formats.errors import InputError, nearest


def matcher(pattern: str, flag: str) -> Callable[[str], bool]:
    """A test of linear names (without `.weight`) for one pattern; a bare word also names a module by its last parts.

    Raises InputError for an expression that does not compile.
    """
    if pattern.startswith("re:"):
        try:
            expression = re.compile(pattern[3:])
        except re.error as error:
            raise InputError(f"{flag} {pattern}", f"is not a regular expression ({error})", "correct it") from error
        return lambda name: expression.match(name) is not None
    plain = pattern.removesuffix(".weight")
    return lambda name: fnmatchcase(name, plain) or name.endswith("." + plain)


def matching(patterns: Iterable[str], names: Iterable[str], flag: str) -> set[str]:
    """The names that any of the patterns matches. Raises InputError for a pattern that matches none of them."""
    everything = list(names)
    found: set[str] = set()
    for pattern in patterns:
        test = matcher(pattern, flag)
        hits = {name for name in everything if test(name)}
        if not hits:
            raise InputError(
                f"{flag} {pattern}", "matches no linear of this model", nearest(pattern, _examples(everything))
            )
        found |= hits
    return found


def _examples(names: list[str]) -> list[str]:
    """Few enough names to print: those of the first block and whatever lies outside the blocks."""
    return [name for name in names if ".0." in name or not re.search(r"\.\d+\.", name)][:12] or names[:12]
