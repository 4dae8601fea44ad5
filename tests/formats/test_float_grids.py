"""Floating-point grids against ml_dtypes, which shares no code with them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress_llm.formats.float_grids import E2M1, E4M3, E8M0

ORACLES = {"e2m1": ml_dtypes.float4_e2m1fn, "e4m3": ml_dtypes.float8_e4m3fn, "e8m0": ml_dtypes.float8_e8m0fnu}
SIGNED = (E2M1, E4M3)
floats = st.floats(width=32, allow_nan=False)


def oracle_values(grid, codes: np.ndarray) -> np.ndarray:
    return codes.view(ORACLES[grid.name]).astype(np.float32)


def bits(values: torch.Tensor) -> list[int]:
    return values.view(torch.int32).tolist()


def test_ends():
    assert (E2M1.lowest, E2M1.highest, E2M1.reach, E2M1.bits) == (-6, 6, 6, 4)
    assert (E4M3.lowest, E4M3.highest, E4M3.reach, E4M3.bits) == (-448, 448, 448, 8)
    assert (E8M0.lowest, E8M0.highest, E8M0.bits) == (2.0**-127, 2.0**127, 8)


@pytest.mark.parametrize("grid", SIGNED, ids=lambda grid: grid.name)
def test_every_code_decodes_as_it_should_and_comes_back(grid):
    raw = np.arange(1 << grid.bits, dtype=np.uint8)
    codes = torch.from_numpy(raw).view(torch.int8)
    values = grid.decode(codes)
    expected = oracle_values(grid, raw)
    known = ~np.isnan(expected)
    assert np.array_equal(values.numpy()[known].view(np.int32), expected[known].view(np.int32))
    assert bool(values[torch.from_numpy(~known)].isnan().all())
    assert torch.equal(grid.encode(values)[torch.from_numpy(known)], codes[torch.from_numpy(known)])


def test_every_power_decodes_as_it_should_and_comes_back():
    raw = np.arange(256, dtype=np.uint8)
    values = E8M0.decode(torch.from_numpy(raw))
    assert np.array_equal(values.numpy(), oracle_values(E8M0, raw), equal_nan=True)
    assert torch.equal(E8M0.encode(values), torch.from_numpy(raw))


@settings(deadline=None, max_examples=150)
@given(values=st.lists(floats, min_size=1, max_size=40), grid=st.sampled_from(SIGNED), power=st.integers(-12, 12))
def test_encoding_takes_the_nearest_value_and_saturates(values, grid, power):
    x = torch.tensor(values)
    x = torch.where(x.abs() < 2.0**60, x * 2.0**power, x)
    expected = x.clamp(grid.lowest, grid.highest).numpy().astype(ORACLES[grid.name])
    codes = grid.encode(x)
    assert codes.dtype == torch.int8
    assert codes.view(torch.uint8).tolist() == expected.view(np.uint8).tolist()
    assert bits(grid.nearest(x)) == bits(grid.decode(codes))


@pytest.mark.parametrize("grid", SIGNED, ids=lambda grid: grid.name)
def test_halves_go_to_the_even_code(grid):
    values = grid.decode(torch.arange(grid.top + 1).to(torch.int8))
    halves = (values[1:] + values[:-1]) / 2
    codes = grid.encode(halves)
    assert bool((codes % 2 == 0).all())
    assert torch.equal(grid.decode(grid.encode(-halves)), -grid.decode(codes))
    assert torch.equal(grid.encode(torch.nextafter(halves, values[:-1])), torch.arange(grid.top).to(torch.int8))
    assert torch.equal(grid.encode(torch.nextafter(halves, values[1:])), torch.arange(1, grid.top + 1).to(torch.int8))


@settings(deadline=None, max_examples=60)
@given(values=st.lists(st.floats(width=32, min_value=2.0**-126, allow_infinity=False), min_size=1, max_size=40))
def test_powers_are_the_nearest(values):  # ml_dtypes rounds subnormal numbers up, also those nearer to 2^-127
    x = torch.tensor(values).clamp(max=2.0**127)
    expected = x.numpy().astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    assert E8M0.encode(x).tolist() == expected.tolist()
    assert torch.equal(E8M0.nearest(x), E8M0.decode(E8M0.encode(x)))


def test_powers_below_the_normal_numbers():
    x = torch.tensor([2.0**-127, 6.355e-39, 1.4999 * 2.0**-127, 1.5 * 2.0**-127, 1.9 * 2.0**-127, 2.0**-126])
    assert E8M0.encode(x).tolist() == [0, 0, 0, 1, 1, 1]


def test_what_is_no_number():
    nan = torch.tensor([float("nan")])
    assert bool(E4M3.decode(E4M3.encode(nan)).isnan())
    assert bool(E8M0.decode(E8M0.encode(nan)).isnan())
    assert E2M1.decode(E2M1.encode(nan)).tolist() == [6.0]
    ends = torch.tensor([float("inf"), float("-inf")])
    assert E2M1.nearest(ends).tolist() == [6.0, -6.0]
    assert E4M3.decode(E4M3.encode(ends)).tolist() == [448.0, -448.0]
    assert E8M0.encode(torch.tensor([0.0, -1.0, float("inf")])).tolist() == [0, 0, 254]


@pytest.mark.parametrize("grid", [*SIGNED, E8M0], ids=lambda grid: grid.name)
def test_what_is_given_is_left_alone(grid):
    x = torch.tensor([1000.0, 0.3, -7.0])
    codes = grid.encode(x)
    before = codes.clone()
    grid.nearest(x)
    grid.decode(codes)
    assert x.tolist() == [1000.0, pytest.approx(0.3), -7.0]
    assert torch.equal(codes, before)


def test_bits_above_a_short_code_are_not_looked_at():
    codes = torch.tensor([0x13, 0x2B], dtype=torch.int8)
    assert E2M1.decode(codes).tolist() == [1.5, -1.5]
