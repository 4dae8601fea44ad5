"""Which tensors a packed linear is stored as, and whether given tensors are those.

A layout is computed from shapes alone. The plan counts bytes with it, a packing is held to it when it writes, and what
is read from disk is checked against it before anything is decoded. Scales are stored alike in every integer packing, so
their part of the layout is here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from .errors import InputError
from .rounded import Rounded
from .scheme import Scheme

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NUMBERS = ("weight_scale", "weight_values")
"""Every packing stores one tensor of these names: in the dtype of the model, and a sign that a linear is packed."""


class Expected(int):
    """A size of a tensor that only the data decide; its value is what to expect. Whatever is stored fits it."""


def is_exact(layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bool:
    """Whether all sizes are promises."""
    return not any(isinstance(size, Expected) for _, shape in layout.values() for size in shape)


def scale_layout(scheme: Scheme, out_features: int, in_features: int, scale_dtype: torch.dtype) -> Layout:
    """`weight_scale` [out, groups] and, for static activations, `input_scale` [1], both in `scale_dtype`.

    Raises InputError when the group size does not divide `in_features`.
    """
    if in_features % scheme.span(in_features):
        cause = f"does not divide the {in_features} inputs of a linear"
        raise InputError(f"group size {scheme.group_size}", cause, "use one that divides, or one scale a channel")
    layout: Layout = {"weight_scale": (scale_dtype, (out_features, scheme.groups(in_features)))}
    if has_input_scale(scheme):
        layout["input_scale"] = (scale_dtype, (1,))
    return layout


def has_input_scale(scheme: Scheme) -> bool:
    """Whether the scale of the inputs is calibrated and stored."""
    return scheme.activation is not None and not scheme.activation.dynamic


def scale_tensors(rounded: Rounded) -> dict[str, Tensor]:
    """The tensors of `scale_layout`, without a copy where they are contiguous.

    Raises ValueError when zero points or an input scale are there that the scheme does not have, or the reverse.
    """
    scheme, params = rounded.scheme, rounded.params
    if (params.zero is None) != scheme.symmetric:
        raise ValueError(f"{scheme.name} is {'' if scheme.symmetric else 'a'}symmetric, its zero points say otherwise")
    if (rounded.input_scale is not None) != has_input_scale(scheme):
        raise ValueError(f"the scale of the inputs must be given for static activations only, {scheme.name} differs")
    tensors = {"weight_scale": params.scale.contiguous()}
    if rounded.input_scale is not None:
        tensors["input_scale"] = rounded.input_scale.contiguous()
    return tensors


def layout_of(rounded: Rounded) -> tuple[Scheme, int, int, torch.dtype]:
    """The arguments that `Packing.layout` takes for `rounded`."""
    return rounded.scheme, *rounded.shape, rounded.params.scale.dtype


def held_to(tensors: dict[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """`tensors` themselves. Raises ValueError where they are not what `layout` promised: a rounding broke its word."""
    for suffix, cause, _ in _faults(tensors, layout):
        raise ValueError(f"{suffix} {cause}")
    return tensors


def check_read(tensors: Mapping[str, Tensor], layout: Layout) -> None:
    """Raise InputError naming the first suffix that is missing, unexpected, or of another dtype or shape."""
    for suffix, cause, fix in _faults(tensors, layout):
        raise InputError(suffix, cause, fix)


def numbers_suffix(suffixes: Iterable[str]) -> str | None:
    """Which of `NUMBERS` is among the `suffixes` of a linear, None where it is not packed."""
    present = set(suffixes)
    return next((suffix for suffix in NUMBERS if suffix in present), None)


def stored_scale_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype of `weight_scale`, of values where there are no scales.

    Raises InputError when both are missing, and for no dtype of a scale.
    """
    suffix = numbers_suffix(tensors)
    if suffix is None:
        raise InputError(NUMBERS[0], "is missing", "use a complete checkpoint")
    dtype = tensors[suffix].dtype
    if dtype not in SCALE_DTYPES:
        allowed = ", ".join(_name(known) for known in SCALE_DTYPES)
        raise InputError(suffix, f"has dtype {_name(dtype)}", f"store it as one of {allowed}")
    return dtype


def _faults(tensors: Mapping[str, Tensor], layout: Layout) -> Iterator[tuple[str, str, str]]:
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
