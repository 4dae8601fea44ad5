"""The table of methods: a name, what it needs to see, which schemes it fits, and the function.

Two kinds, both small. A *rounding* turns one weight into codes; a *transform* rewrites a block without changing its
function. A recipe is any number of transforms and one rounding. A new method is one file and one row here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from ..calibration.statistics import Field, Stats
from ..formats.errors import InputError, nearest
from ..formats.rounded import Rounded
from ..formats.scheme import Scheme


class Round(Protocol):
    """`weight` float32 [out, in] → codes, with the statistics of its inputs where the method asked for them.

    `scale_dtype` is the dtype that scales are stored in (the checkpoint's own). `options` are the method's settings
    with their defaults filled in. Must not change `weight`.
    """

    def __call__(
        self, weight: Tensor, scheme: Scheme, stats: Stats | None, scale_dtype: Any, options: Mapping[str, Any]
    ) -> Rounded: ...


def any_scheme(scheme: Scheme) -> str | None:
    """The `misfit` of a method that works on every scheme."""
    del scheme
    return None


@dataclass(frozen=True)
class Rounding:
    """One way to round: `needs` names statistics fields, `misfit(scheme)` says why a scheme does not fit (or None)."""

    name: str
    function: Round
    needs: frozenset[Field] = frozenset()
    misfit: Callable[[Scheme], str | None] = any_scheme
    options: Mapping[str, Any] = field(default_factory=dict)


ROUNDINGS: dict[str, Rounding] = {}


def register(rounding: Rounding) -> Rounding:
    """Add a row to the table."""
    ROUNDINGS[rounding.name] = rounding
    return rounding


def rounding(name: str) -> Rounding:
    """The rounding called `name`. Raises InputError with the nearest name."""
    if name.lower() not in ROUNDINGS:
        raise InputError(f"--method {name}", "no method has this name", nearest(name, ROUNDINGS))
    return ROUNDINGS[name.lower()]
