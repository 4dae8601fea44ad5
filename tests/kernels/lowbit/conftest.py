"""Weights in fragment order for the tests of kernels."""

from __future__ import annotations

import pytest
import torch

from compress_llm.kernels.lowbit.layout import Arranged, arrange, arrange_floating, arrange_narrow


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Sample:
    """A random weight of few distinct numbers: codes, scales, zeros, the same arranged, and as float64 [out, in]."""

    def __init__(self, rows, columns, bits=4, group=128, zero=None, dtype=torch.float16, device="cpu", narrow=False):
        generator = torch.Generator().manual_seed(rows * columns + bits)
        half = 1 << (bits - 1)
        self.codes = torch.randint(-half, half, (rows, columns), dtype=torch.int8, generator=generator)
        groups = columns // group if group else 1
        self.scale = (torch.rand(rows, groups, generator=generator) + 0.5) / half
        self.scale = self.scale if narrow else self.scale.to(dtype)
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
        if narrow:
            self.arranged: Arranged = arrange_narrow(self.codes, self.scale).to(device)
        else:
            self.arranged = arrange(self.codes, self.scale, self.zero, bits, group, dtype).to(device)
        if self.arranged.codes.is_cuda:
            torch.cuda.synchronize()


@pytest.fixture
def sample() -> type[Sample]:
    return Sample


class FloatSample:
    """A random floating-point weight: codes (uint8), scales, factors; arranged; and as float64 [out, in].

    `kind` is nvfp4, mxfp4, mxfp8, fp8 (factors of rows only) or fp8 with 8-bit activations (narrow).
    """

    def __init__(self, kind, rows, columns, device="cpu"):
        generator = torch.Generator().manual_seed(rows * columns + len(kind))
        self.bits = 4 if kind.endswith("4") else 8
        self.codes = torch.randint(0, 1 << self.bits, (rows, columns), dtype=torch.uint8, generator=generator)
        if self.bits == 8:  # neither NaN nor so wide a range that few codes are all that matters
            self.codes = (torch.randn(rows, columns, generator=generator) * 8).to(torch.float8_e4m3fn).view(torch.uint8)
        self.scale = self.factors = None
        step = torch.ones(1, 1, dtype=torch.float64)
        if kind == "nvfp4":
            self.scale = (torch.rand(rows, columns // 16, generator=generator) * 3).to(torch.float8_e4m3fn)
            self.scale[0] = torch.tensor([0.0, 2.0**-9, 2.0**-6, 448.0]).repeat(columns // 64)
            self.factors = torch.tensor([1 / 300])
            step = self.scale.double().repeat_interleave(16, 1)
        elif kind.startswith("mx"):
            self.scale = torch.randint(115, 125, (rows, columns // 32), dtype=torch.uint8, generator=generator)
            step = torch.exp2(self.scale.double() - 127).repeat_interleave(32, 1)
        else:
            self.factors = torch.rand(rows, generator=generator) / 100
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
        values = table[self.codes.long()] if self.bits == 4 else self.codes.view(torch.float8_e4m3fn).double()
        self.exact = values * step * (1 if self.factors is None else self.factors.double().view(-1, 1))
        if kind == "narrow":
            codes = self.codes.view(torch.float8_e4m3fn)
            self.arranged: Arranged = arrange_narrow(codes, self.factors).to(device)
        else:
            self.arranged = arrange_floating(self.codes, self.scale, self.factors, self.bits).to(device)
        if self.arranged.codes.is_cuda:
            torch.cuda.synchronize()


@pytest.fixture
def float_sample() -> type[FloatSample]:
    return FloatSample


class BlockSample:
    """A random 8-bit weight with a scale for 128 x 128 codes: codes, scales, arranged, and as float64 [out, in]."""

    def __init__(self, rows, columns, floating, device="cpu"):
        generator = torch.Generator().manual_seed(rows * columns + floating)
        numbers = torch.randn(rows, columns, generator=generator) * 30
        self.codes = numbers.to(torch.float8_e4m3fn) if floating else numbers.round().clamp(-128, 127).to(torch.int8)
        self.scale = torch.exp2(torch.randn(-(-rows // 128), columns // 128, generator=generator) * 2 - 8)
        self.by_row = self.scale.repeat_interleave(128, 0)[:rows]
        self.exact = self.codes.double() * self.by_row.double().repeat_interleave(128, 1)
        self.arranged: Arranged = arrange_narrow(self.codes, self.by_row, 128).to(device)
        if self.arranged.codes.is_cuda:
            torch.cuda.synchronize()


@pytest.fixture
def block_sample() -> type[BlockSample]:
    return BlockSample


def relative(y: torch.Tensor, exact: torch.Tensor) -> float:
    """|y - exact| over |exact|, in float64 on the CPU."""
    difference = y.double().cpu() - exact.cpu()
    return float(difference.norm() / exact.norm())


@pytest.fixture
def error():
    return relative
