"""Our own layout for integer codes whose zero points are real numbers, as half-quadratic quantisation finds them.

`pack-quantized` but for one tensor (the whole is in docs/formats/int4-float-zero.md):

| tensor | dtype, shape | what |
|---|---|---|
| `weight_zero_point` | scale dtype [out, groups] | zero points in units of a code: weight = (code - zero) · scale |
"""

from __future__ import annotations

import torch
from torch import Tensor

from .pack_quantized import PackQuantized
from .scheme import Scheme


class FloatZero(PackQuantized):
    """The packing of weight-only schemes with real-valued zero points, which are stored as they are."""

    name = "compress-int4-float-zero"

    def zero_layout(
        self, scheme: Scheme, out_features: int, in_features: int, scale_dtype: torch.dtype
    ) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of the zero points. Raises ValueError for a scheme whose zero points are of another kind."""
        if scheme.zero_dtype != "float":
            raise ValueError(f"{scheme.name} has integer zero points, which {self.name} does not store")
        return scale_dtype, (out_features, scheme.groups(in_features))

    def pack_zero(self, zero: Tensor, bits: int) -> Tensor:
        """The zero points themselves."""
        del bits
        return zero.contiguous()

    def unpack_zero(self, stored: Tensor, bits: int, out_features: int) -> Tensor:
        """The zero points themselves."""
        del bits, out_features
        return stored
