"""`auto`: of several methods, the one whose codes lose least of the output on tokens that none of them was fitted to.

Linears that engines fuse must share a scheme, so they are judged as one. The tokens held out from the statistics matter:
a method that fits the calibration text closely looks better on it than it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..calibration.statistics import output_error
from ..formats.errors import InputError
from ..formats.rounded import Rounded


@dataclass(frozen=True)
class Candidate:
    """What one method made of a group of linears that read the same input.

    `weights` are the float weights [out, in] that were rounded and `second_moment` [in, in] that of the held-out inputs
    they read: behind a transform both are the transformed ones, and the output they stand for is still the same.
    """

    method: str
    weights: Sequence[Tensor]
    rounded: Sequence[Rounded]
    second_moment: Tensor

    def error(self) -> float:
        """The share of the output's energy that is lost: Σ tr(E H Eᵀ) / Σ tr(W H Wᵀ)."""
        lost = whole = 0.0
        for weight, codes in zip(self.weights, self.rounded, strict=True):
            exact = weight.float()
            lost += output_error(exact - codes.dequantize(), self.second_moment)
            whole += output_error(exact, self.second_moment)
        return lost / whole if whole > 0 else 0.0


@dataclass(frozen=True)
class Choice:
    """The method to use, the next best (None when there was no other), and the error of each."""

    winner: str
    runner_up: str | None
    errors: dict[str, float]


def choose_method(candidates: Sequence[Candidate]) -> Choice:
    """The candidate with the least error; of equals the one named first. Raises InputError when there is none."""
    if not candidates:
        raise InputError("--method auto", "has no method to choose from", "name a scheme that some method fits")
    errors = {candidate.method: candidate.error() for candidate in candidates}
    ranked = sorted(errors, key=lambda name: errors[name])
    return Choice(ranked[0], ranked[1] if len(ranked) > 1 else None, errors)
