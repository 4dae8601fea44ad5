"""The tables of methods by name. A new method is one file, and one row here."""

from __future__ import annotations

from .awq import AWQ
from .gptq import GPTQ
from .hadamard import HADAMARD
from .hqq import HQQ
from .method import Rotation, Rounding, Transformation
from .rtn import RTN
from .smoothquant import SMOOTHQUANT

ROUNDINGS: dict[str, Rounding] = {row.name: row for row in (RTN, HQQ, GPTQ)}
TRANSFORMS: dict[str, Transformation] = {row.name: row for row in (AWQ, SMOOTHQUANT)}
ROTATIONS: dict[str, Rotation] = {row.name: row for row in (HADAMARD,)}
