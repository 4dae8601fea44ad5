"""What a method is: the protocols of roundings and transforms, and the tensors that a transform works on.

Three kinds, all small. A *rounding* turns one weight into codes; a *transform* rewrites a block without changing its
function; a *rotation* is the basis in which a linear is rounded and run. A recipe is any number of transforms, maybe a
rotation, and one rounding. A new method is one file and one row in `quantizers/registry.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ..calibration.statistics import Field, Stats
from ..formats.rounded import Rounded
from ..formats.scheme import Scheme

Options = Mapping[str, Any]


class Round(Protocol):
    """`weight` float32 [out, in] → codes, with the statistics of its inputs where the method asked for them.

    `scale_dtype` is the dtype that scales are stored in (the checkpoint's own). `options` are the method's settings
    with their defaults filled in. `peak` (one number) is the largest magnitude of all weights that have to agree on
    what spans a tensor, None where that is this weight alone; `scales.choose` takes it. Must not change `weight`.
    """

    def __call__(
        self,
        weight: Tensor,
        scheme: Scheme,
        stats: Stats | None,
        scale_dtype: torch.dtype,
        options: Options,
        peak: Tensor | None = None,
    ) -> Rounded: ...


class RoundPruned(Protocol):
    """As `Round`, of a weight that keeps only what is not zero in `pruned` (float32 [out, in]), its pruned form.

    The scheme is symmetric; codes of what is dropped are 0. Must not change `weight` or `pruned`.
    """

    def __call__(
        self,
        weight: Tensor,
        pruned: Tensor,
        scheme: Scheme,
        stats: Stats | None,
        scale_dtype: torch.dtype,
        options: Options,
        peak: Tensor | None = None,
    ) -> Rounded: ...


def any_scheme(scheme: Scheme) -> str | None:
    """The `misfit` of a method that works on every scheme."""
    del scheme
    return None


@dataclass(frozen=True)
class Rounding:
    """One way to round: `needs` names statistics fields, `misfit(scheme)` says why a scheme does not fit (or None).

    `options` are the settings with their defaults. `hints` are settings for the transforms before it, by name: what
    suits this rounding where they know such a setting. `masked` rounds what pruning left, None where it cannot.
    """

    name: str
    function: Round
    needs: frozenset[Field] = frozenset()
    misfit: Callable[[Scheme], str | None] = any_scheme
    options: Options = field(default_factory=dict)
    hints: Options = field(default_factory=dict)
    masked: RoundPruned | None = None

    def fields(self, options: Options) -> frozenset[Field]:
        """The statistics that a run with these options needs: some scale rules look at the inputs too."""
        weighted = options.get("scale_rule") == "local-hessian"
        more: frozenset[Field] = frozenset({"second_moment"}) if weighted else frozenset()
        return self.needs | more


@dataclass
class Source:
    """Where a scale is folded into, so that the block's function stays: the producer of a feed's input.

    `weight` is edited in place: a norm's weight [in], or (kind "linear") the rows [source, columns] of a linear, a view
    of the v or up rows where the checkpoint fuses them; `bias` [source] likewise. `offset` is 1 for norms that multiply
    by 1 + weight. `shared` [in] names the source row of every input channel of the targets where several channels read
    the same row (grouped query heads: v → o), None for one to one.
    """

    kind: Literal["norm", "linear"]
    name: str
    weight: Tensor
    bias: Tensor | None = None
    offset: float = 0.0
    shared: Tensor | None = None


@dataclass
class Target:
    """A linear that reads a feed's input: `weight` [out, in] edited in place, `scheme` None where it stays as it is."""

    name: str
    weight: Tensor
    scheme: Scheme | None


@dataclass
class LiveFeed:
    """A feed of `formats/architectures.py` with its tensors: every linear that reads one input, and what produces it.

    `source` is None where nothing is known that a scale could move into. `targets` must be all readers of the input,
    quantised or not (a router too). `stats` are of that input and are rescaled with it, and so are `held`: the same
    statistics of tokens that no search looks at, and `parts`, those of single readers (experts see some tokens each).
    """

    source: Source | None
    targets: Sequence[Target]
    stats: Stats
    held: Stats | None = None
    parts: Sequence[Stats] = ()


class Transform(Protocol):
    """Rewrite one feed in place; its function, quantisation aside, stays. Returns what the report should say.

    `scale_dtype` is the dtype of scales and of the stored norm weights. The record holds JSON values only.
    """

    def __call__(self, feed: LiveFeed, scale_dtype: torch.dtype, options: Options) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Transformation:
    """One transform: `rounding` and `rounding_options` say how to round where the recipe names no rounding after it."""

    name: str
    function: Transform
    needs: frozenset[Field] = frozenset()
    misfit: Callable[[Scheme], str | None] = any_scheme
    options: Options = field(default_factory=dict)
    rounding: str = "rtn"
    rounding_options: Options = field(default_factory=dict)

    def settings(self, then: Rounding, given: Options | None = None) -> dict[str, Any]:
        """The options of a run in which `then` rounds: defaults, what it hints at, and on top what was `given`."""
        hints = {name: value for name, value in then.hints.items() if name in self.options}
        return {**self.options, **hints, **(given or {})}


@dataclass(frozen=True)
class Rotation:
    """A change of basis of a linear's inputs, carried by its scheme: weights and statistics are rotated before the
    rounding, inputs while the model runs.

    `block(scheme, in_features, options)` is the number of neighbouring inputs that are mixed; it raises InputError
    where none fits. `rounding` and `rounding_options` as for a transform.
    """

    name: str
    block: Callable[[Scheme, int, Options], int]
    misfit: Callable[[Scheme], str | None] = any_scheme
    options: Options = field(default_factory=dict)
    rounding: str = "rtn"
    rounding_options: Options = field(default_factory=dict)
