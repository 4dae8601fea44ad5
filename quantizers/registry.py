"""The tables of methods by name. A new method is one file, and one row here."""

from __future__ import annotations

from ..formats.errors import InputError, nearest
from .awq import AWQ
from .gptq import GPTQ
from .hqq import HQQ
from .method import Rounding, Transformation
from .rtn import RTN
from .smoothquant import SMOOTHQUANT

ROUNDINGS: dict[str, Rounding] = {row.name: row for row in (RTN, HQQ, GPTQ)}
TRANSFORMS: dict[str, Transformation] = {row.name: row for row in (AWQ, SMOOTHQUANT)}


def rounding(name: str) -> Rounding:
    """The rounding called `name` (case does not matter). Raises InputError with the nearest name."""
    found = ROUNDINGS.get(name.lower())
    if found is None:
        raise InputError(f"--method {name}", "no rounding has this name", nearest(name, ROUNDINGS))
    return found


def transform(name: str) -> Transformation:
    """The transform called `name` (case does not matter). Raises InputError with the nearest name."""
    found = TRANSFORMS.get(name.lower())
    if found is None:
        raise InputError(f"--method {name}", "no transform has this name", nearest(name, TRANSFORMS))
    return found
