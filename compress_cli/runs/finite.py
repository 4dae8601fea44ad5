"""NaN and Inf in a checkpoint: they can only be seen in the weights, so they end a run when they stream by."""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats.checkpoint import Checkpoint
from ...formats.errors import InputError


def check_finite(tensor: Tensor, name: str) -> Tensor:
    """The tensor itself. Raises InputError naming it when it holds NaN or Inf."""
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise InputError(name, "holds NaN or Inf", "repair the checkpoint; nothing was written")
    return tensor


def check_finite_on_disk(checkpoint: Checkpoint, name: str) -> None:
    """`check_finite` of a tensor that is only copied, a chunk at a time. Raises InputError."""
    dtype = checkpoint.tensors[name].dtype
    if dtype.is_floating_point and dtype.itemsize > 1:
        checkpoint.copy_bytes(name, lambda chunk: check_finite(torch.frombuffer(bytearray(chunk), dtype=dtype), name))
