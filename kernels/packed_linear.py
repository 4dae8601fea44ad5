"""The linear of a packed model: it holds the tensors of the checkpoint as they are and never the dense weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ..formats.scheme import Scheme
from .matmul import matmul
from .reference import decode_rows


class PackedLinear(nn.Module):
    """Stands in for an `nn.Linear` whose weight is stored packed.

    `tensors` (suffix -> tensor, as `Packing.layout` names them) become buffers of the same names, so that the state
    dict of a loaded model has the names of its checkpoint. Their dtypes never change: `.to(dtype)` is for the bias.
    """

    in_features: int
    out_features: int

    def __init__(
        self, scheme: Scheme, shape: tuple[int, int], tensors: Mapping[str, Tensor], bias: Tensor | None = None
    ) -> None:
        super().__init__()
        self.scheme = scheme
        self.out_features, self.in_features = shape
        for suffix, tensor in tensors.items():
            self.register_buffer(suffix, tensor)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The packed tensors by suffix."""
        return {name: buffer for name, buffer in self._buffers.items() if buffer is not None}

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features], in the dtype of `x`."""
        return matmul(x, self.tensors, self.scheme, (self.out_features, self.in_features), self.bias)

    def weight_rows(self, start: int = 0, stop: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Rows `start` to `stop` of the weight, decoded to `dtype`: [rows, in_features].

        For logits over a part of the vocabulary at a time. Of a rotated scheme, the weight is in the rotated basis.
        """
        return decode_rows(self.tensors, self.scheme, (self.out_features, self.in_features), start, stop, dtype)

    def extra_repr(self) -> str:
        """What `print(model)` shows of this module."""
        size = self.scheme.group_size
        span = "one scale a channel" if size is None else f"group_size={size}"
        span = span if self.scheme.rounds else "no scales"
        basis = "" if self.scheme.rotation is None else f", rotation={self.scheme.rotation}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"scheme={self.scheme.name}, {span}{basis}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        """What `.to()`, `.half()` and the like go through: packed tensors follow to the device, not to the dtype."""
        packed = {id(buffer) for buffer in self.tensors.values()}

        def kept(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if id(tensor) in packed and moved.dtype != tensor.dtype else moved

        super()._apply(kept, recurse)
        return self
