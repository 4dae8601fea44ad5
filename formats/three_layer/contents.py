"""Whether three layers that were read lead to places inside the weight, each tensor by itself and with its offsets.

What passes is decoded by index alone, on any device and by any kernel, without looking at it again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import InputError
from ..ragged import checked_offsets
from . import steps
from .groups import unpack_pairs
from .tiles import Grid

_WHOLE = "use a whole copy of the checkpoint"


def check(tensors: Mapping[str, Tensor], grid: Grid) -> None:
    """Raise InputError naming the suffix that does not fit a weight of `grid`. Dtypes and shapes are its layout's."""
    order = tensors["weight_permutation"].sort().values
    if not torch.equal(order, torch.arange(grid.in_features, dtype=order.dtype, device=order.device)):
        raise InputError("weight_permutation", f"is no order of {grid.in_features} columns", _WHOLE)
    pairs = unpack_pairs(tensors["weight_positions"], grid.groups)
    if bool(((pairs & 3) >= (pairs >> 2)).any()):
        raise InputError("weight_positions", "two positions of a group are not in ascending order", _WHOLE)
    checked_offsets(tensors, "weight_step_offsets", "weight_steps")
    passed = steps.reach(tensors["weight_steps"], tensors["weight_step_offsets"])
    if bool((passed > grid.slots().to(passed.device)).any()):
        raise InputError("weight_steps", "lead out of a tile", _WHOLE)
    _check_residual(tensors, grid)


def _check_residual(tensors: Mapping[str, Tensor], grid: Grid) -> None:
    counts = checked_offsets(tensors, "weight_residual_offsets", "weight_residual")
    column = tensors["weight_residual_columns"]
    if column.shape != tensors["weight_residual"].shape:
        raise InputError("weight_residual_columns", "are not as many as weight_residual", _WHOLE)
    if bool(((column < 0) | (column >= grid.in_features)).any()):
        raise InputError("weight_residual_columns", "lie outside the weight", _WHOLE)
    place = torch.repeat_interleave(counts) * grid.in_features + column
    if bool((place[1:] <= place[:-1]).any()):
        raise InputError("weight_residual_columns", "are not in ascending order in a row", _WHOLE)
