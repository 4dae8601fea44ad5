"""Weights in fragment order for the tests of kernels."""

from __future__ import annotations

import pytest
import torch

from compress_llm.kernels.lowbit.layout import Arranged, arrange, arrange_narrow


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Sample:
    """A random weight of few distinct numbers: codes, scales, zeros, the same arranged, and as float64 [out, in]."""

    def __init__(self, rows, columns, bits=4, group=128, zero=None, dtype=torch.float16, device="cpu", integer=False):
        generator = torch.Generator().manual_seed(rows * columns + bits)
        half = 1 << (bits - 1)
        self.codes = torch.randint(-half, half, (rows, columns), dtype=torch.int8, generator=generator)
        groups = columns // group if group else 1
        self.scale = (torch.rand(rows, groups, generator=generator) + 0.5) / half
        self.scale = self.scale if integer else self.scale.to(dtype)
        self.zero = None
        if zero == "int":
            self.zero = torch.randint(-half, half, (rows, groups), dtype=torch.int8, generator=generator)
        if zero == "float":
            self.zero = (torch.randn(rows, groups, generator=generator) * half / 4).to(dtype)
        self.dtype, span = dtype, group or columns
        values = self.codes.double()
        if self.zero is not None:
            values = values - self.zero.double().repeat_interleave(span, 1)
        self.exact = values * self.scale.double().repeat_interleave(span, 1)
        if integer:
            self.arranged: Arranged = arrange_narrow(self.codes, self.scale).to(device)
        else:
            self.arranged = arrange(self.codes, self.scale, self.zero, bits, group, dtype).to(device)
        if self.arranged.codes.is_cuda:
            torch.cuda.synchronize()


@pytest.fixture
def sample() -> type[Sample]:
    return Sample


def relative(y: torch.Tensor, exact: torch.Tensor) -> float:
    """|y - exact| over |exact|, in float64 on the CPU."""
    difference = y.double().cpu() - exact.cpu()
    return float(difference.norm() / exact.norm())


@pytest.fixture
def error():
    return relative
