"""Decoders of floating-point codes against ml_dtypes, and the order of rows that share scales."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from compress_llm.formats.scheme import SCHEMES
from compress_llm.kernels.float_reference import (
    e2m1_values,
    e8m0_values,
    power_below,
    round_e2m1,
    round_e4m3,
    scale_rows,
)


def test_every_pair_of_codes():
    packed = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    raw = np.stack([packed.numpy() & 15, packed.numpy() >> 4], axis=-1).reshape(16, 32)
    expected = raw.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(e2m1_values(packed).numpy().view(np.int32), expected.view(np.int32))


def test_rounding_is_that_of_the_formats():
    x = torch.cat([torch.linspace(-8, 8, 2049), torch.randn(500) * 100])
    four = x.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    eight = x.clamp(-448, 448).numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(round_e2m1(x).numpy(), four)
    assert np.array_equal(round_e4m3(x).numpy(), eight)


def test_powers():
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(e8m0_values(codes).numpy(), expected, equal_nan=True)
    assert power_below(torch.tensor([1.0, 1.99, 2.0, 0.3])).tolist() == [1.0, 1.0, 2.0, 0.25]


def test_rows_find_the_scale_of_their_block():
    tensors = {"weight_scale": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    found = scale_rows(tensors, SCHEMES["FP8_BLOCK"], slice(127, 130))
    assert found.tolist() == [[1.0, 2.0], [3.0, 4.0], [3.0, 4.0]]
    assert scale_rows({"weight_scale": torch.tensor([5.0])}, SCHEMES["FP8"], slice(3, 5)).tolist() == [[5.0], [5.0]]
