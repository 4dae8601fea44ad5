"""Which tensors a packed linear is stored as, and whether given tensors are those.

A layout is computed from shapes alone. The plan counts bytes with it, a packing is held to it when it writes, and what
is read from disk is checked against it before anything is decoded. Scales are stored alike in every packing, so their
part of the layout is here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from .errors import InputError
from .rounded import QParams, Rounded
from .scheme import Scheme

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NUMBERS = ("weight_scale", "weight_values")
"""Every packing stores one tensor of these names: in the dtype of the model, and a sign that a linear is packed."""


class Described(Protocol):
    """What a layout says of a tensor: a tensor has it, and so has its entry in the header of a file."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        ...


class Expected(int):
    """A size of a tensor that only the data decide; its value is what to expect. Whatever is stored fits it."""


def is_exact(layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bool:
    """Whether all sizes are promises."""
    return not any(isinstance(size, Expected) for _, shape in layout.values() for size in shape)


def scale_layout(scheme: Scheme, out_features: int, in_features: int, scale_dtype: torch.dtype) -> Layout:
    """`weight_scale` and what belongs to it: `weight_global_scale`, the calibrated scale of the inputs.

    Scales are [out, groups], one for each block of rows where rows share them, [1] for a whole tensor; in `scale_dtype`
    or the dtype of their codes. Raises InputError when the group size does not divide `in_features`.
    """
    if in_features % scheme.span(in_features):
        cause = f"does not divide the {in_features} inputs of a linear"
        raise InputError(f"group size {scheme.group_size}", cause, "use one that divides, or one scale a channel")
    blocks = -(-out_features // scheme.sharing_rows(out_features))
    shape = (1,) if scheme.strategy == "tensor" else (blocks, scheme.groups(in_features))
    layout: Layout = {"weight_scale": (_code_dtype(scheme) or scale_dtype, shape)}
    if scheme.global_scale:
        layout["weight_global_scale"] = (torch.float32, (1,))
    suffix = input_suffix(scheme)
    if suffix is not None:
        layout[suffix] = (torch.float32 if suffix == "input_global_scale" else scale_dtype, (1,))
    return layout


def input_suffix(scheme: Scheme) -> str | None:
    """The name of the calibrated scale of the inputs, None where none is stored."""
    return None if scheme.activation is None else scheme.activation.calibrated


def has_input_scale(scheme: Scheme) -> bool:
    """Whether a scale of the inputs is calibrated and stored."""
    return input_suffix(scheme) is not None


def scale_tensors(rounded: Rounded) -> dict[str, Tensor]:
    """The tensors of `scale_layout`, without a copy where they are contiguous.

    Raises ValueError when zero points, global scales or an input scale are there that the scheme does not have, or the
    reverse, and when rows differ that share a scale.
    """
    scheme, params = rounded.scheme, rounded.params
    if (params.zero is None) != scheme.symmetric:
        raise ValueError(f"{scheme.name} is {'' if scheme.symmetric else 'a'}symmetric, its zero points say otherwise")
    if (rounded.input_scale is not None) != has_input_scale(scheme):
        raise ValueError(f"the scale of the inputs must be given where it is stored only, {scheme.name} differs")
    if params.grid != scheme.scale_grid or (params.global_scale is not None) != scheme.global_scale:
        raise ValueError(f"the scales are not of the kind that {scheme.name} stores")
    tensors = {"weight_scale": _stored_scale(params.scale, scheme, rounded.shape[0])}
    if params.global_scale is not None:
        tensors["weight_global_scale"] = params.global_scale.contiguous()
    suffix = input_suffix(scheme)
    if suffix is not None and rounded.input_scale is not None:
        tensors[suffix] = rounded.input_scale.contiguous()
    return tensors


def _stored_scale(scale: Tensor, scheme: Scheme, out_features: int) -> Tensor:
    count = scheme.sharing_rows(out_features)
    if scale.ndim != 2 or scale.shape[0] != out_features:
        raise ValueError(f"scales are {list(scale.shape)} for {out_features} rows")
    if count > 1:
        full = scale
        scale = scale[::count]
        if not torch.equal(scale.repeat_interleave(count, 0)[:out_features], full):
            raise ValueError(f"rows of one block have different scales, {scheme.name} stores one for {count}")
    codes = _code_dtype(scheme)
    stored = scale.contiguous() if codes is None else scale.contiguous().view(codes)
    return stored.reshape(1) if scheme.strategy == "tensor" and stored.numel() == 1 else stored


def read_scales(
    tensors: Mapping[str, Tensor], scheme: Scheme, out_features: int, zero: Tensor | None = None
) -> QParams:
    """The inverse of `scale_tensors`: parameters with a row for every row of the weight, and its `zero` points."""
    scale, count = tensors["weight_scale"], scheme.sharing_rows(out_features)
    if scheme.scale_grid is not None and scale.dtype.is_floating_point:
        scale = scale.view(torch.int8)
    if count > 1:
        scale = scale.reshape(-1, scale.shape[-1]).repeat_interleave(count, 0)[:out_features]
    return QParams(scale.reshape(out_features, -1), zero, scheme.scale_grid, tensors.get("weight_global_scale"))


def read_input_scale(tensors: Mapping[str, Tensor], scheme: Scheme) -> Tensor | None:
    """The calibrated scale of the inputs, where there is one."""
    suffix = input_suffix(scheme)
    return None if suffix is None else tensors[suffix]


def _code_dtype(scheme: Scheme) -> torch.dtype | None:
    """The dtype that codes of scales have on disk, None where scales are numbers in the checkpoint's dtype."""
    return None if scheme.scale_grid is None else scheme.scale_grid.dtype


def layout_of(rounded: Rounded) -> tuple[Scheme, int, int, torch.dtype]:
    """The arguments that `Packing.layout` takes for `rounded`."""
    return rounded.scheme, *rounded.shape, rounded.params.scale.dtype


def held_to(tensors: dict[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """`tensors` themselves. Raises ValueError where they are not what `layout` promised: a rounding broke its word."""
    for suffix, cause, _ in _faults(tensors, layout):
        raise ValueError(f"{suffix} {cause}")
    return tensors


def check_read(tensors: Mapping[str, Described], layout: Layout) -> None:
    """Raise InputError naming the first suffix that is missing, unexpected, or of another dtype or shape."""
    for suffix, cause, fix in _faults(tensors, layout):
        raise InputError(suffix, cause, fix)


def misfits(tensors: Mapping[str, Described], layout: Layout) -> list[str]:
    """Suffixes of the tensors whose sizes `layout` has otherwise: more than one tell that it is another weight's."""
    sized = {suffix: shape for suffix, (_, shape) in layout.items() if suffix in tensors}
    return [suffix for suffix, shape in sized.items() if not _fits(tuple(tensors[suffix].shape), shape)]


def check_shape(tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> None:
    """Raise InputError where `weight_shape` says another shape than `shape`."""
    stored = tensors["weight_shape"].tolist()
    if stored != list(shape):
        cause = f"says {stored} for a weight of {list(shape)}"
        raise InputError("weight_shape", cause, "use a checkpoint whose tensors fit its config.json")


def numbers_of(scheme: Scheme) -> str:
    """Which of `NUMBERS` weights of `scheme` are stored with."""
    return NUMBERS[0] if scheme.rounds else NUMBERS[1]


def numbers_suffix(suffixes: Iterable[str]) -> str | None:
    """Which of `NUMBERS` is among the `suffixes` of a linear, None where it is not packed."""
    present = set(suffixes)
    return next((suffix for suffix in NUMBERS if suffix in present), None)


def stored_scale_dtype(tensors: Mapping[str, Described], scheme: Scheme) -> torch.dtype:
    """The dtype of `weight_scale`, of values where there are no scales, for `layout`.

    Raises InputError when both are missing, and for no dtype of a scale.
    """
    suffix = numbers_suffix(tensors)
    if suffix is None:
        raise InputError(numbers_of(scheme), "is missing", "use a complete checkpoint")
    dtype = tensors[suffix].dtype
    if scheme.scale_grid is not None:  # then the layout knows it
        return dtype
    if dtype not in SCALE_DTYPES:
        allowed = ", ".join(_name(known) for known in SCALE_DTYPES)
        raise InputError(suffix, f"has dtype {_name(dtype)}", f"store it as one of {allowed}")
    return dtype


def _faults(tensors: Mapping[str, Described], layout: Layout) -> Iterator[tuple[str, str, str]]:
    for suffix, (dtype, shape) in layout.items():
        promised = f"{_name(dtype)} {list(shape)}"
        if suffix not in tensors:
            yield suffix, "is missing", f"add the {promised} tensor, or use a complete checkpoint"
        elif (found := tensors[suffix]).dtype != dtype or not _fits(tuple(found.shape), shape):
            cause = f"is {_name(found.dtype)} {list(found.shape)} where the scheme asks for {promised}"
            yield suffix, cause, "use a checkpoint whose tensors fit its quantization_config"
    for suffix in tensors:
        if suffix not in layout:
            yield suffix, "has no place in this layout", "use a checkpoint whose tensors fit its quantization_config"


def _fits(found: tuple[int, ...], promised: tuple[int, ...]) -> bool:
    if len(found) != len(promised):
        return False
    return all(isinstance(size, Expected) or size == here for here, size in zip(found, promised, strict=True))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
