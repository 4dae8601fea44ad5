"""The scheme table: what each preset name means for a weight, its scales and its inputs.

A scheme is data. Adding one is adding a row; the methods, packings, planner and evaluator read the row and have no
special cases for its name. Preset names are the ones that compressed-tensors, vLLM and torchao users know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from .errors import InputError, nearest
from .float_grids import E2M1, E4M3, E8M0, ScaleGrid
from .grids import INT4, INT8, UNROUNDED, Grid, Unrounded
from .sparsity import Sparsity

Strategy = Literal["tensor", "channel", "group", "tensor_group", "block"]
GroupSize = int | Literal["channel", "auto"]
AUTO_GROUPS = (128, 64, 32)
INPUT_RULES = ("max", "four-over-six", "mse")
"""How the scale of a group of inputs is chosen where scales are codes of E4M3."""


@dataclass(frozen=True)
class Activation:
    """How the inputs of a linear are quantised while it runs.

    `granularity` "token" is one scale a row of the input, "group" one for every `group_size` neighbours in a row, both
    found while running (`dynamic`); "tensor" with `dynamic=False` is one scale a linear, calibrated and stored as
    `input_scale`. Scales of groups may be codes of `scale_grid`, under a calibrated `input_global_scale` of the linear
    where `global_scale` says so; `scale_rule` is then one of `INPUT_RULES` (`kernels/activations.py`).
    """

    grid: Grid
    granularity: Literal["token", "tensor", "group"] = "token"
    dynamic: bool = True
    group_size: int | None = None
    scale_grid: ScaleGrid | None = None
    global_scale: bool = False
    scale_rule: str = INPUT_RULES[0]

    @property
    def calibrated(self) -> str | None:
        """The suffix under which a scale of the inputs is stored, None where all are found while running."""
        if self.global_scale:
            return "input_global_scale"
        return None if self.dynamic else "input_scale"


@dataclass(frozen=True)
class Scheme:
    """Everything that decides what codes of a weight mean.

    `group_size` is the number of neighbouring inputs that share a scale, for strategies that have groups of them;
    `block_rows` the number of neighbouring output rows that do (strategy "tensor": all). `symmetric` grids have no zero
    point, else `zero_dtype` says whether it is a code or a real number in the dtype of the scales. Scales are numbers
    in the checkpoint's dtype, or codes of `scale_grid`, divided by one `global_scale` a weight where there is one.
    `packing` names the layout on disk (`formats/packings.py`), `scale_rule` how scales are chosen without data.
    `rotation` is the number of neighbouring inputs that a Hadamard matrix mixes before the product
    (`kernels/hadamard.py`); codes are of the weight in that basis, rotated likewise. `sparsity` says how many weights
    are dropped, None for none; `layouts` maps what `--sparse-layout` may ask for to packings. `method` is the one to
    use where none is named.
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
    block_rows: int = 1
    scale_grid: ScaleGrid | None = None
    global_scale: bool = False
    scale_rule: str = "minmax"
    rotation: int | None = None
    sparsity: Sparsity | None = None
    layouts: Mapping[str, str] = field(default_factory=dict, compare=False)
    method: str = "rtn"

    @property
    def rounds(self) -> bool:
        """Whether weights become codes; else they are stored as the model has them."""
        return not isinstance(self.grid, Unrounded)

    @property
    def input_rule(self) -> str | None:
        """How scales of the inputs are found, of `INPUT_RULES`; None where there is no choice."""
        return self.activation.scale_rule if self.activation is not None and self.activation.global_scale else None

    @property
    def spans_tensor(self) -> bool:
        """Whether a weight has a number that all its rows share, which engines want equal in what they fuse."""
        return self.global_scale or self.strategy == "tensor"

    def sharing_rows(self, out_features: int) -> int:
        """Number of neighbouring rows that share their scales."""
        return out_features if self.strategy == "tensor" else self.block_rows

    @property
    def own_format(self) -> bool:
        """Whether the layout is one of ours, which no other engine reads."""
        return self.packing.startswith("compress-")

    def groups(self, in_features: int) -> int:
        """Number of scales along the input of a row with `in_features` weights."""
        return 1 if self.group_size is None else in_features // self.group_size

    def span(self, in_features: int) -> int:
        """Number of neighbouring inputs that share one scale."""
        return in_features if self.group_size is None else self.group_size

    @property
    def span_text(self) -> str:
        """What shares a scale, in words that follow "has"."""
        if not self.rounds:
            return "no scales"
        if self.group_size is not None:
            return f"groups of {self.group_size}"
        return "one scale a weight" if self.strategy == "tensor" else "one scale an output row"

    def with_group(self, group_size: int | Literal["channel"] | None, flag: str = "--group-size") -> Scheme:
        """The same scheme with another group size; "channel" or None gives one scale a row.

        Raises InputError, blaming `flag`, for a size below one, and when the scheme's engines know only its own.
        """
        if group_size == self.group_size or group_size == self.strategy == "channel":
            return self
        key = f"{flag} {group_size}"
        if not self.groupable:
            raise InputError(key, f"scheme {self.name} has {self.span_text}", "leave it out")
        if group_size is None or group_size == "channel":
            return replace(self, strategy="channel", group_size=None)
        if group_size < 1:
            raise InputError(key, "is not a group size", "give a positive number or channel")
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

    def with_input_rule(self, rule: str | None, flag: str = "--input-scale-rule") -> Scheme:
        """The same scheme with the scales of its inputs chosen by another rule; None leaves them as they are.

        Raises InputError, blaming `flag`, for a rule that does not exist or cannot choose among such scales.
        """
        if rule is None:
            return self
        key, inputs, rule = f"{flag} {rule}", self.activation, rule.lower()
        if rule not in INPUT_RULES:
            raise InputError(key, "no rule has this name", nearest(rule, INPUT_RULES))
        if inputs is None or self.input_rule is None:
            cause = f"scheme {self.name} has no inputs in groups with scales of E4M3"
            raise InputError(key, cause, "leave it out, or use NVFP4")
        return replace(self, activation=replace(inputs, scale_rule=rule))

    def with_layout(self, layout: str | None) -> Scheme:
        """The same scheme in another of its layouts. Raises InputError for one that it does not have."""
        if layout is None:
            return self
        if layout not in self.layouts:
            fix = nearest(layout, self.layouts) if self.layouts else "leave it out"
            raise InputError(f"--sparse-layout {layout}", f"scheme {self.name} has no such layout", fix)
        return replace(self, packing=self.layouts[layout])


def _group_inputs(
    grid: Grid, size: int, scale_grid: ScaleGrid | None = None, *, under_global: bool = False
) -> Activation:
    return Activation(grid, "group", group_size=size, scale_grid=scale_grid, global_scale=under_global)


def _rowwise(name: str, grid: Grid, packing: str, activation: Activation | None) -> Scheme:
    return Scheme(name, grid, packing, "channel", None, activation=activation, groupable=False)


def _blockwise(name: str, grid: Grid, packing: str) -> Scheme:
    inputs = _group_inputs(grid, 128)
    return Scheme(name, grid, packing, "block", 128, activation=inputs, groupable=False, block_rows=128)


def _nvfp4(name: str, activation: Activation | None = None) -> Scheme:
    return Scheme(
        name,
        E2M1,
        "nvfp4-pack-quantized",
        "tensor_group",
        16,
        activation=activation,
        groupable=False,
        scale_grid=E4M3,
        global_scale=True,
        scale_rule="mse",
    )


def _mx(name: str, grid: Grid, packing: str, activation: Activation | None = None) -> Scheme:
    return Scheme(
        name,
        grid,
        packing,
        "group",
        32,
        activation=activation,
        groupable=False,
        scale_grid=E8M0,
        scale_rule="mse",
    )


_SPARSE_LAYOUTS = {"three-layer": "compress-three-layer", "bitmap": "compress-bitmap"}
SCHEMES: dict[str, Scheme] = {
    row.name: row
    for row in (
        Scheme("W4A16", INT4, "pack-quantized"),
        Scheme("W4A16_ASYM", INT4, "pack-quantized", symmetric=False),
        Scheme("W4A16_HQQ", INT4, "compress-int4-float-zero", group_size=64, symmetric=False, zero_dtype="float"),
        Scheme("W8A16", INT8, "pack-quantized", "channel", None),
        Scheme("W8A16_ASYM", INT8, "pack-quantized", "channel", None, symmetric=False),
        Scheme("W4A8", INT4, "pack-quantized", activation=Activation(INT8)),
        Scheme("W4AFP8", INT4, "pack-quantized", activation=Activation(E4M3)),
        _rowwise("W8A8", INT8, "int-quantized", Activation(INT8)),
        _rowwise("W8A8_STATIC", INT8, "int-quantized", Activation(INT8, "tensor", dynamic=False)),
        _blockwise("W8A8_BLOCK", INT8, "int-quantized"),
        replace(_rowwise("FP8", E4M3, "float-quantized", Activation(E4M3, "tensor", dynamic=False)), strategy="tensor"),
        _rowwise("FP8_DYNAMIC", E4M3, "float-quantized", Activation(E4M3)),
        _blockwise("FP8_BLOCK", E4M3, "float-quantized"),
        _nvfp4("NVFP4A16"),
        _nvfp4("NVFP4", _group_inputs(E2M1, 16, E4M3, under_global=True)),
        _mx("MXFP4A16", E2M1, "mxfp4-pack-quantized"),
        _mx("MXFP4", E2M1, "mxfp4-pack-quantized", _group_inputs(E2M1, 32, E8M0)),
        _mx("MXFP8A16", E4M3, "mxfp8-quantized"),
        _mx("MXFP8", E4M3, "mxfp8-quantized", _group_inputs(E4M3, 32, E8M0)),
        replace(
            _rowwise("SPARSE50", UNROUNDED, "compress-three-layer", None),
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
