"""The scheme table: what each preset name means for a weight, its scales and its inputs.

A scheme is data. Adding one is adding a row; the methods, packings, planner and evaluator read the row and have no
special cases for its name. Preset names are the ones that compressed-tensors, vLLM and torchao users know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from .errors import InputError, nearest
from .grids import INT4, INT8, UNROUNDED, Grid, Unrounded
from .sparsity import Sparsity

Strategy = Literal["channel", "group"]
GroupSize = int | Literal["channel", "auto"]
AUTO_GROUPS = (128, 64, 32)


@dataclass(frozen=True)
class Activation:
    """How the inputs of a linear are quantised while it runs.

    `granularity` "token" is one scale a row of the input, found while running (`dynamic`); "tensor" with
    `dynamic=False` is one scale a linear, calibrated and stored as `input_scale`.
    """

    grid: Grid
    granularity: Literal["token", "tensor"] = "token"
    dynamic: bool = True


@dataclass(frozen=True)
class Scheme:
    """Everything that decides what codes of a weight mean.

    `group_size` is the number of neighbouring inputs that share a scale, for strategy "group". `symmetric` grids have
    no zero point, else `zero_dtype` says whether it is a code or a real number in the dtype of the scales. `packing`
    names the layout on disk (`formats/packings.py`). `sparsity` says how many weights are dropped, None for none;
    `layouts` maps what `--sparse-layout` may ask for to packings. `method` is the one to use where none is named.
    """

    name: str
    grid: Grid
    packing: str
    strategy: Strategy = "group"
    group_size: int | None = 128
    symmetric: bool = True
    activation: Activation | None = None
    groupable: bool = True
    zero_dtype: Literal["int", "float"] = "int"
    sparsity: Sparsity | None = None
    layouts: Mapping[str, str] = field(default_factory=dict, compare=False)
    method: str = "rtn"

    @property
    def rounds(self) -> bool:
        """Whether weights become codes; else they are stored as the model has them."""
        return not isinstance(self.grid, Unrounded)

    def groups(self, in_features: int) -> int:
        """Number of scales along the input of a row with `in_features` weights."""
        return 1 if self.group_size is None else in_features // self.group_size

    def span(self, in_features: int) -> int:
        """Number of neighbouring inputs that share one scale."""
        return in_features if self.group_size is None else self.group_size

    def with_group(self, group_size: int | Literal["channel"] | None) -> Scheme:
        """The same scheme with another group size; "channel" or None gives one scale a row.

        Raises InputError for a size below one, and when the scheme's engines know only one scale a row.
        """
        if group_size is None or group_size == "channel":
            return replace(self, strategy="channel", group_size=None)
        if group_size < 1:
            raise InputError(f"--group-size {group_size}", "is not a group size", "give a positive number or channel")
        if not self.groupable:
            has = "one scale an output row" if self.rounds else "no scales"
            raise InputError(f"--group-size {group_size}", f"scheme {self.name} has {has}", "use channel")
        return replace(self, strategy="group", group_size=group_size)

    def with_symmetry(self, symmetric: bool) -> Scheme:
        """The same scheme with or without zero points, named so. Raises InputError where the layout has no choice."""
        if symmetric == self.symmetric:
            return self
        if self.packing != "pack-quantized":
            flag, has = ("--sym", "always has") if symmetric else ("--asym", "stores no")
            raise InputError(flag, f"scheme {self.name} {has} zero points", f"leave {flag} out")
        name = self.name.removesuffix("_ASYM") + ("" if symmetric else "_ASYM")
        return replace(self, name=name, symmetric=symmetric)

    def with_sparsity(self, ratio: float | None, pattern: str | None) -> Scheme:
        """The same scheme with another share of weights dropped, or in another pattern; None leaves them as they are.

        Raises InputError for a scheme that drops none, and for what `Sparsity` refuses.
        """
        if ratio is None and pattern is None:
            return self
        if self.sparsity is None:
            flag = f"--sparsity {ratio}" if ratio is not None else f"--pattern {pattern}"
            raise InputError(flag, f"scheme {self.name} drops no weights", "leave it out, or use a sparse scheme")
        kept = self.sparsity
        return replace(self, sparsity=Sparsity(kept.ratio if ratio is None else ratio, pattern or kept.pattern))

    def with_layout(self, layout: str | None) -> Scheme:
        """The same scheme in another of its layouts. Raises InputError for one that it does not have."""
        if layout is None:
            return self
        if layout not in self.layouts:
            fix = nearest(layout, self.layouts) if self.layouts else "leave it out"
            raise InputError(f"--sparse-layout {layout}", f"scheme {self.name} has no such layout", fix)
        return replace(self, packing=self.layouts[layout])


_SPARSE_LAYOUTS = {"three-layer": "compress-three-layer", "bitmap": "compress-bitmap"}
SCHEMES: dict[str, Scheme] = {
    row.name: row
    for row in (
        Scheme("W4A16", INT4, "pack-quantized"),
        Scheme("W4A16_ASYM", INT4, "pack-quantized", symmetric=False),
        Scheme("W4A16_HQQ", INT4, "compress-int4-float-zero", group_size=64, symmetric=False, zero_dtype="float"),
        Scheme("W8A16", INT8, "pack-quantized", strategy="channel", group_size=None),
        Scheme("W8A16_ASYM", INT8, "pack-quantized", strategy="channel", group_size=None, symmetric=False),
        Scheme(
            "W8A8",
            INT8,
            "int-quantized",
            strategy="channel",
            group_size=None,
            activation=Activation(INT8),
            groupable=False,
        ),
        Scheme(
            "W8A8_STATIC",
            INT8,
            "int-quantized",
            strategy="channel",
            group_size=None,
            activation=Activation(INT8, granularity="tensor", dynamic=False),
            groupable=False,
        ),
        Scheme(
            "SPARSE50",
            UNROUNDED,
            "compress-three-layer",
            strategy="channel",
            group_size=None,
            groupable=False,
            sparsity=Sparsity(),
            layouts=_SPARSE_LAYOUTS,
            method="sparsegpt",
        ),
        Scheme("SPARSE50_W4A16", INT4, "compress-bitmap-codes", sparsity=Sparsity(), method="sparsegpt"),
    )
}
ALIASES = {"INT8": "W8A8", "INT4": "W4A16"}


def scheme(name: str, flag: str = "--scheme") -> Scheme:
    """The preset called `name` (case does not matter). Raises InputError, blaming `flag`, with the nearest name."""
    folded = name.upper()
    known = ALIASES.get(folded, folded)
    if known not in SCHEMES:
        raise InputError(f"{flag} {name}", "no scheme has this name", nearest(name, SCHEMES))
    return SCHEMES[known]
