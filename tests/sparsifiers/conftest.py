"""A weight, and statistics of inputs that lean on each other: what tells the sparsifiers apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compress_llm.calibration.statistics import Stats

Case = Callable[..., tuple[Tensor, Stats]]


@pytest.fixture
def case() -> Case:
    """Makes `weight` [out, width] and the second moment of `tokens` correlated inputs of unequal size."""

    def make(out: int = 24, width: int = 64, tokens: int = 512, seed: int = 0) -> tuple[Tensor, Stats]:
        generator = torch.Generator().manual_seed(seed)
        mix = torch.eye(width) + 0.3 * torch.randn(width, width, generator=generator)
        x = torch.randn(tokens, width, generator=generator) @ mix * torch.linspace(0.2, 3, width)
        stats = Stats()
        stats.add(x, ["second_moment"])
        return torch.randn(out, width, generator=generator) * 0.05, stats

    return make
