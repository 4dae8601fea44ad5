"""Sparse weights for the tests of kernels."""

from __future__ import annotations

import pytest
import torch

from compress_llm.kernels.sparse import three_layer
from compress_llm.kernels.sparse.geometry import Geometry
from compress_llm.kernels.sparse.layout import Bitmap, arrange


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def masked(rows: int, columns: int, kept: float = 0.5, kind: str = "even") -> torch.Tensor:
    """A mask of some character: even, skewed (columns kept more or less often, as of a Wanda-pruned weight), with whole
    rows full and empty, of one side only, 2:4."""
    generator = torch.Generator().manual_seed(rows * columns)
    chance = torch.rand(rows, columns, generator=generator)
    if kind == "skewed":
        chance = chance - torch.randn(columns, generator=generator)
        return chance >= chance.quantile(1 - kept, dim=1, keepdim=True)
    if kind == "rows":
        mask = chance < kept
        mask[::3], mask[1::5] = True, False
        return mask
    if kind == "side":
        return (torch.arange(columns) % 64 < 64 * kept).expand(rows, columns)
    if kind == "2:4":
        return (chance.view(rows, -1, 4).argsort(-1).argsort(-1) < 2).view(rows, columns)
    return chance < kept


class Sample:
    """A random sparse weight, dense on the CPU, and arranged on `device`."""

    def __init__(self, rows, columns, kept=0.5, kind="even", dtype=torch.bfloat16, device="cpu", cut=None):
        generator = torch.Generator().manual_seed(rows + columns)
        self.mask = masked(rows, columns, kept, kind)
        self.weight = torch.randn(rows, columns, generator=generator).to(dtype) * self.mask
        self.weight[self.weight == 0] = 0.0  # no negative zeros
        cut = None if cut is None else Geometry(*cut)
        self.arranged: Bitmap = arrange(self.weight.to(device), cut=cut)

    def layers(self, cut=None) -> three_layer.ThreeLayer:
        """The same weight in three layers."""
        return three_layer.arrange(self.weight.to(self.arranged.device), None if cut is None else Geometry(*cut))

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        """The product in float64, on the CPU."""
        return x.double().cpu() @ self.weight.double().T


@pytest.fixture
def sample() -> type[Sample]:
    return Sample


@pytest.fixture
def error():
    def relative(y: torch.Tensor, exact: torch.Tensor) -> float:
        return float((y.double().cpu() - exact).norm() / exact.norm())

    return relative
