"""Which implementation of an operation runs, and why not another.

An operation is the product with one kind of packed weight. It has implementations in the order of preference: `cuda`
(CUDA C++), `triton`, `scaled` (Triton, microscaled operands as they lie), `three-layer` (CUDA C++, sparse weights in
another layout), `reference` (plain torch, always last and always able). The first one that can is picked. A name given
by the caller, `prefer`, or `COMPRESS_KERNEL` asks for one by name, and then it runs or the call fails: nothing falls
back silently. The pick and every reason are data, for `compress doctor` and `compress bench`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

import torch

from ..formats.errors import InputError, nearest

VARIABLE = "COMPRESS_KERNEL"
THREE_LAYER = "three-layer"
_preferred: list[str] = []
Sparse = Literal["no", "any", "bitmap", "three-layer"]
"""The layout of a weight that is sparse and not rounded: "any" where it is in none yet, "no" for other weights."""


@dataclass(frozen=True)
class Problem:
    """What an implementation is asked for: everything that decides whether it can.

    `device` is a torch device type; `capability` the CUDA compute capability, (0, 0) elsewhere; `tokens` rows of the
    input, `out_features` by `in_features` the weight; `dtype` that of the result; `group` inputs that share a scale (0:
    a row); `narrow` 8-bit activations; `floating` codes (and 8-bit activations) that are floating-point numbers;
    `microscaled` weights and activations alike whose groups have scales that hardware knows; `sparse` the layout of
    weights that are sparse and not rounded.
    """

    device: str
    capability: tuple[int, int]
    tokens: int
    out_features: int
    in_features: int
    dtype: torch.dtype
    bits: int
    group: int
    narrow: bool
    floating: bool = False
    microscaled: bool = False
    sparse: Sparse = "no"


@dataclass(frozen=True)
class Implementation:
    """A name and `misfit(problem)`: why it cannot run a problem here, or None where it can."""

    name: str
    misfit: Callable[[Problem], str | None]


@dataclass(frozen=True)
class Pick:
    """The implementation that runs a problem, why, and for each other one why it does not."""

    name: str
    reason: str
    others: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def prefer(name: str | None) -> Iterator[None]:
    """Within it every pick is the implementation of that name, whatever $COMPRESS_KERNEL says; None changes nothing.

    Raises InputError for a name that does not exist.
    """
    if name is None:
        yield
        return
    _known(name, f"kernel '{name}'")
    _preferred.append(name)
    try:
        yield
    finally:
        _preferred.pop()


def pick(problem: Problem, asked: str | None = None) -> Pick:
    """The implementation for `problem`: the one `asked` for, preferred, named by $COMPRESS_KERNEL, or the first fit.

    Raises InputError for a name that does not exist, and for one that cannot run the problem.
    """
    name, key = _asked(asked)
    return _pick(problem, name, key)


def reference_alone(reason: str, asked: str | None = None) -> Pick:
    """The pick for a weight that no other implementation knows, for `reason`.

    Raises InputError where another one is `asked` for, preferred or named by $COMPRESS_KERNEL.
    """
    name, key = _asked(asked)
    if name is not None:
        _known(name, key)
        if name != "reference":
            raise _cannot(key, reason)
    others = {item.name: reason for item in IMPLEMENTATIONS if item.name != "reference"}
    return Pick("reference", reason, others)


def check_asked(device: str) -> None:
    """Raise InputError where what is asked for does not exist, or runs no weight on this torch device type."""
    name, key = _asked()
    if name is None:
        return
    _known(name, key)
    if name != "reference" and device != "cuda":
        raise _cannot(key, f"the weights are on a {device}")


def _asked(name: str | None = None) -> tuple[str | None, str]:
    """The `name` given, else what `prefer` names, else $COMPRESS_KERNEL, else None; and how the user said it."""
    if name is None and _preferred:
        name = _preferred[-1]
    if name is not None:
        return name, f"kernel '{name}'"
    named = os.environ.get(VARIABLE) or None
    return named, f"{VARIABLE}={named}"


@lru_cache(maxsize=4096)
def _pick(problem: Problem, asked: str | None, key: str) -> Pick:
    reasons = {item.name: item.misfit(problem) for item in IMPLEMENTATIONS}
    if asked is not None:
        _known(asked, key)
        if (misfit := reasons[asked]) is not None:
            raise _cannot(key, misfit)
        return Pick(
            asked, "asked for", {name: why or "not asked for" for name, why in reasons.items() if name != asked}
        )
    chosen = next(name for name, misfit in reasons.items() if misfit is None)
    others = {name: why or f"{chosen} is preferred" for name, why in reasons.items() if name != chosen}
    return Pick(chosen, "the first that can run here", others)


def _cannot(key: str, reason: str) -> InputError:
    return InputError(key, f"it cannot run here ({reason})", "name another implementation, or none")


def _known(name: str, key: str) -> None:
    names = [item.name for item in IMPLEMENTATIONS]
    if name not in names:
        raise InputError(key, "no kernel implementation has this name", nearest(name, names))


def _no_cuda(problem: Problem) -> str | None:
    if problem.device == "cuda":
        return None
    if torch.version.cuda is None:
        return "torch is a CPU build"
    return "torch sees no CUDA GPU" if not torch.cuda.is_available() else f"the tensors are on {problem.device}"


def _cuda_misfit(problem: Problem) -> str | None:
    return _other_layout(problem) or _hopper_misfit(problem)


def _hopper_misfit(problem: Problem) -> str | None:
    from .cuda import nvrtc

    if (reason := _no_cuda(problem) or _wrong_type(problem)) is not None:
        return reason
    if problem.capability != (9, 0):
        return "written for compute capability 9.0 (H100, H200)"
    if nvrtc.library() is None:
        return "libnvrtc is not installed"
    unit = 16 if problem.narrow else 8
    return (
        None if problem.in_features % unit == 0 else f"rows of {problem.in_features} inputs are not whole 16-byte units"
    )


def _three_layer_misfit(problem: Problem) -> str | None:
    if problem.sparse == "no":
        return "for sparse weights"
    if problem.sparse == "bitmap":
        return "the weight is in another layout: ask for it before the weight is loaded"
    return _hopper_misfit(problem)


def _other_layout(problem: Problem) -> str | None:
    return "the weight is in the layout of three-layer" if problem.sparse == THREE_LAYER else None


def _triton_misfit(problem: Problem) -> str | None:
    if (reason := _other_layout(problem) or _no_cuda(problem) or _wrong_type(problem)) is not None:
        return reason
    if problem.narrow and problem.bits == 4:
        return "multiplies 4-bit weights as 16-bit numbers"
    least = (8, 9) if problem.narrow and problem.floating else (8, 0)
    if problem.capability < least:
        return f"needs compute capability {least[0]}.{least[1]} or newer"
    return None if find_spec("triton") is not None else "triton is not installed"


def _scaled_misfit(problem: Problem) -> str | None:
    if (reason := _no_cuda(problem) or _wrong_type(problem)) is not None:
        return reason
    if not problem.microscaled:
        return "for microscaled weights and activations"
    if problem.capability < (10, 0):
        return "needs compute capability 10.0 or newer"
    return None if find_spec("triton") is not None else "triton is not installed"


def _wrong_type(problem: Problem) -> str | None:
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 or bfloat16, not {str(problem.dtype).removeprefix('torch.')}"
    return None


def _always(problem: Problem) -> str | None:
    del problem


IMPLEMENTATIONS = (
    Implementation("cuda", _cuda_misfit),
    Implementation("triton", _triton_misfit),
    Implementation("scaled", _scaled_misfit),
    Implementation(THREE_LAYER, _three_layer_misfit),  # `cuda` can where this can, and comes first
    Implementation("reference", _always),
)
