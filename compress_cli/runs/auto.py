"""`--method auto`: for every group of linears that share an input, the method that loses least on held-out tokens.

A quarter of the calibration windows is kept out of all statistics. Each candidate is fitted on the rest, and its output
error is measured on the quarter: with the second moment of the held-out inputs, or, where inputs are quantised too, on
a sample of them with their own rounding in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...calibration.lanes import Stage
from ...calibration.statistics import Stats, output_error
from ...formats.architectures import Architecture
from ...formats.rounded import Rounded
from ...formats.scheme import Scheme
from ...kernels.activations import quantize_activation
from ...quantizers.input_scales import input_scale
from ...quantizers.method import LiveFeed, Rounding, Transformation
from ...quantizers.registry import ROUNDINGS, TRANSFORMS
from .feeds import Heads, live_feeds
from .methods import Pick

Masters = dict[str, Tensor]


@dataclass(frozen=True)
class Trial:
    """A transform or none, and the rounding after it."""

    transform: Transformation | None
    rounding: Rounding
    options: Mapping[str, Any]

    @property
    def transform_options(self) -> Mapping[str, Any]:
        """The transform's settings, with what the rounding hints at."""
        return {} if self.transform is None else self.transform.settings(self.rounding)

    @property
    def label(self) -> str:
        """As on the command line."""
        return ",".join(part.name for part in (self.transform, self.rounding) if part is not None)


@dataclass
class Auto:
    """Tries the methods on one block. `dtype` is that of its stored scales."""

    facts: Architecture
    prefix: str
    schemes: Mapping[str, Scheme | None]
    heads: Heads
    dtype: torch.dtype

    def picks(self, masters: Masters, fit: Mapping[Stage, Stats], held: Mapping[Stage, Stats]) -> dict[str, Pick]:
        """The pick of every quantised linear; where a transform won, `masters` are transformed, from all tokens."""
        errors: dict[tuple[str, ...], dict[str, float]] = {}
        trials = {trial.label: trial for trial in self._trials()}
        by_transform: dict[str, list[Trial]] = {}  # trials that start from the same transformed weights
        for trial in trials.values():
            name = (
                "" if trial.transform is None else f"{trial.transform.name} {sorted(trial.transform_options.items())}"
            )
            by_transform.setdefault(name, []).append(trial)
        for here in by_transform.values():
            transform = here[0].transform
            copies = {name: tensor.clone() for name, tensor in masters.items()}
            for feed in self._feeds(copies, _copied(fit), _copied(held)):
                if transform is not None and feed.source is None:
                    continue
                if transform is not None:
                    transform.function(feed, self.dtype, here[0].transform_options)
                key = tuple(target.name for target in feed.targets)
                errors.setdefault(key, {}).update({trial.label: self._error(trial, feed) for trial in here})
        picks: dict[str, Pick] = {}
        whole = {stage: seen.merge(held[stage]) for stage, seen in fit.items()}
        for feed in self._feeds(masters, whole, None):
            ranked = sorted((errors[tuple(target.name for target in feed.targets)]).items(), key=lambda item: item[1])
            trial = trials[ranked[0][0]]
            if trial.transform is not None:
                trial.transform.function(feed, self.dtype, trial.transform_options)
            details = {"runner_up": ranked[1][0] if len(ranked) > 1 else None, "held_out_errors": dict(ranked)}
            pick = Pick(trial.label, trial.rounding, trial.options, details)
            picks.update({target.name: pick for target in feed.targets if target.scheme is not None})
        return picks

    def _feeds(
        self, masters: Masters, fit: Mapping[Stage, Stats], held: Mapping[Stage, Stats] | None
    ) -> Iterator[LiveFeed]:
        for feed in live_feeds(self.facts, self.prefix, masters, self.schemes, fit, self.heads, held):
            if any(target.scheme is not None for target in feed.targets):
                yield feed

    def _trials(self) -> Iterator[Trial]:
        schemes = [scheme for scheme in self.schemes.values() if scheme is not None]
        roundings = [row for row in ROUNDINGS.values() if not any(row.misfit(scheme) for scheme in schemes)]
        for row in roundings:
            weighted = row.name == "rtn" and not any(scheme.activation for scheme in schemes)
            yield Trial(None, row, {**row.options, "scale_rule": "local-hessian"} if weighted else row.options)
        for transform in TRANSFORMS.values():
            if any(transform.misfit(scheme) for scheme in schemes):
                continue
            for row in roundings:
                if row.name == transform.rounding:
                    yield Trial(transform, row, {**row.options, **transform.rounding_options})
                elif row.needs:
                    yield Trial(transform, row, row.options)

    def _error(self, trial: Trial, feed: LiveFeed) -> float:
        """The share of the output's energy that is lost on the held-out tokens."""
        lost = whole = 0.0
        for target in feed.targets:
            if target.scheme is not None and feed.held is not None:
                rounded = trial.rounding.function(target.weight, target.scheme, feed.stats, self.dtype, trial.options)
                one_lost, one_whole = _energies(target.weight, target.scheme, rounded, feed.held)
                lost, whole = lost + one_lost, whole + one_whole
        return lost / whole if whole > 0 else 0.0


def _energies(weight: Tensor, scheme: Scheme, rounded: Rounded, held: Stats) -> tuple[float, float]:
    """Energy of the output error and of the output itself on held-out inputs; zeros when there were none."""
    decoded = rounded.dequantize()
    activation = scheme.activation
    if activation is not None and held.sample is not None and held.abs_max is not None:
        scale = input_scale(activation, held.abs_max, torch.float32)
        x = held.sample.float()
        exact = x @ weight.T
        error = quantize_activation(x, activation, scale) @ decoded.T - exact
        return float(error.double().square().sum()), float(exact.double().square().sum())
    if held.second_moment is None:
        return 0.0, 0.0
    return output_error(weight - decoded, held.second_moment), output_error(weight, held.second_moment)


def _copied(stats: Mapping[Stage, Stats]) -> dict[Stage, Stats]:
    """Statistics that a transform may rescale without touching these: rescaling replaces tensors and changes none."""
    return {stage: replace(seen, memo={}) for stage, seen in stats.items()}
