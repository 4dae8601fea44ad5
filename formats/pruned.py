"""What pruning returns and a sparse packing takes: a weight with zeros in it, the rest as the model stores it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .rounded import Rounded
from .scheme import Scheme

_BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Pruned:
    """One weight [out, in] in the dtype that its values are stored in.

    A packing drops elements whose bits are all zero and nothing else, so it is exact for any weight, -0.0 included.
    """

    scheme: Scheme
    weight: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.weight.shape[0], self.weight.shape[1]

    def rows(self, start: int, stop: int) -> Pruned:
        """Rows `start` to `stop` of the same weight."""
        return Pruned(self.scheme, self.weight[start:stop])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in] itself, in `dtype`."""
        return self.weight.to(dtype)


Packable = Rounded | Pruned


def bits_of(weight: Tensor) -> Tensor:
    """`weight` seen as integers of its width: what packings move about, so that no bit of a value can change."""
    return weight.contiguous().view(_BITS[weight.dtype.itemsize])
