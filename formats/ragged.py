"""Rows of different length in one flat tensor: where each begins, and whether what was read from disk says so.

Sparse packings store such rows with int64 offsets, one more than there are rows, from 0 to the length.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .errors import InputError

_FIX = "use a whole copy of the checkpoint"


def offsets_of(counts: Tensor) -> Tensor:
    """Where rows of `counts` (int64 [rows]) elements begin, and where the last ends: int64 [rows + 1]."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def checked_offsets(tensors: Mapping[str, Tensor], offsets: str, flat: str, per_element: int = 1) -> Tensor:
    """The lengths (int64 [rows]) that tensor `offsets` gives the rows in `flat`, of which one element holds
    `per_element` entries.

    Raises InputError when offsets do not start at 0, fall, or end elsewhere than `flat` does.
    """
    ends, length = tensors[offsets], tensors[flat].shape[0]
    falls = bool((ends[1:] < ends[:-1]).any())  # differences could overflow
    if int(ends[0]) != 0 or falls or -(-int(ends[-1]) // per_element) != length:
        raise InputError(offsets, f"do not lead from 0 to the {length} elements of {flat}", _FIX)
    return ends.diff()
