"""What weights in any layout of the sparse kernels have in common: fields of which some are tensors on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

Layout = TypeVar("Layout", bound="SparseWeight")


@dataclass(frozen=True)
class SparseWeight:
    """The base of a layout's dataclass. It has no fields of its own."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The fields that are tensors, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return next(iter(self.tensors.values())).device

    @property
    def nbytes(self) -> int:
        """What the weight takes on its device."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def each(self: Layout, change: Callable[[Tensor], Tensor]) -> Layout:
        """The same with what `change` makes of every tensor."""
        return replace(self, **{name: change(tensor) for name, tensor in self.tensors.items()})

    def clone(self: Layout) -> Layout:
        """A copy with memory of its own."""
        return self.each(lambda tensor: tensor.clone())

    def to(self: Layout, device: torch.device | str) -> Layout:
        """The same weight on another device."""
        return self.each(lambda tensor: tensor.to(device))
