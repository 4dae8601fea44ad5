"""What a sparsifier is: a function that drops weights of one linear, and what it needs to know.

A new one is one file and one row in `sparsifiers/registry.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from ..calibration.statistics import Field, Stats

Options = Mapping[str, Any]
Group = tuple[int, int]
"""(dropped, neighbours): of so many neighbours along the input, so many are dropped."""


class Prune(Protocol):
    """`weight` float32 [out, in] → float32 [out, in], +0 where a weight is dropped, the others perhaps changed.

    `ratio` of all weights is dropped, rounded to whole weights of a row or block; where `group` is given it is followed
    and says the same. Must not change `weight`. Raises InputError where statistics that the sparsifier needs are
    missing.
    """

    def __call__(
        self, weight: Tensor, ratio: float, group: Group | None, stats: Stats | None, options: Options
    ) -> Tensor: ...


@dataclass(frozen=True)
class Sparsifier:
    """One way to prune: `needs` names statistics fields, `options` are the settings with their defaults.

    `rounding` and `rounding_options` say how to round what is left, for schemes that round too.
    """

    name: str
    function: Prune
    needs: frozenset[Field] = frozenset()
    options: Options = field(default_factory=dict)
    rounding: str = "rtn"
    rounding_options: Options = field(default_factory=dict)
