"""One linear from its weight to what is left of it: the sparsifier of a recipe, and the refit where it is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..calibration.statistics import Field, Stats
from ..formats.sparsity import Sparsity
from .magnitude import MAGNITUDE
from .method import Options, Sparsifier
from .refit import refit


@dataclass(frozen=True)
class Pruning:
    """How linears are pruned. `options` are the sparsifier's, filled in; `refit` fits what is left to the outputs."""

    sparsifier: Sparsifier
    options: Options = field(default_factory=dict)
    refit: bool = False

    @property
    def needs(self) -> frozenset[Field]:
        """Statistics that it looks at."""
        more: frozenset[Field] = frozenset({"second_moment"}) if self.refit else frozenset()
        return self.sparsifier.needs | more

    def without_statistics(self) -> Pruning:
        """What to do with a linear that no calibration token reached."""
        return Pruning(MAGNITUDE, MAGNITUDE.options)

    def apply(
        self, weight: Tensor, sparsity: Sparsity, ratio: float | None, stats: Stats | None, dtype: torch.dtype
    ) -> Tensor:
        """`weight` (float32 [out, in]) pruned: float32 [out, in] that holds numbers of `dtype`, 0 where dropped.

        `ratio` is the linear's own share of dropped weights, None for that of `sparsity`. Raises InputError where
        statistics are missing.
        """
        share = sparsity.ratio if ratio is None else ratio
        pruned = self.sparsifier.function(weight, share, sparsity.group, stats, self.options)
        if self.refit and stats is not None and stats.second_moment is not None:
            return refit(weight, pruned, stats.second_moment, dtype)
        return pruned.to(dtype).float()
