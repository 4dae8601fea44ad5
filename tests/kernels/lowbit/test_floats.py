"""Bits of floating-point codes and scales in memory: every code, every scale, as the kernels take them apart."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch

from compress_llm.kernels.lowbit import floats

MASK = 0xFFFFFFFF


def rotated(word: int, turn: int) -> int:
    return (word << turn | word >> (32 - turn)) & MASK if turn else word


def floating_pair(word: int, which: int, bits: int, half: bool) -> int:
    """`floating_pair` of common.cuh, operation by operation."""
    if bits == 8:
        v = ((word << 4 & 0x80F080F0) | (word >> 4 & 0x07000700)) if which else word & 0x87F087F0
    elif which == 0:
        v = word & 0x81C081C0
    elif which == 1:
        v = word << 3 & 0x81C081C0
    elif which == 2:
        v = rotated(word, 6) & 0x81C081C0
    else:
        v = (rotated(word, 6) & 0x001B001B) * 0x888 & 0x81C081C0
    return ((v & 0x80008000) | (v & 0x7FFF7FFF) << 3) & MASK if half else v


def scale_pair(word: int, which: int, half: bool) -> int:
    """`scale_pair` of common.cuh, operation by operation."""
    v = rotated(word, 8 * which) & 0x0FF00FF0
    return v << 3 if half else v | 0x70007000


def scale_word(scales: list[int]) -> int:
    """Four bytes of scales: two rows of one block, then of the next."""
    packed = floats.pack_scales(torch.tensor(scales, dtype=torch.uint8).view(2, 2))
    return int.from_bytes(bytes(packed.flatten().tolist()), "little")


def number(pattern: int, half: bool) -> float:
    kind = np.float16 if half else ml_dtypes.bfloat16
    return float(np.uint16(pattern).view(kind))


def meaning(code: int, bits: int) -> float:
    return float(np.uint8(code).view(ml_dtypes.float4_e2m1fn if bits == 4 else ml_dtypes.float8_e4m3fn))


def word_of(codes: list[list[int]], bits: int) -> int:
    packed = floats.pack_words(torch.tensor(codes, dtype=torch.uint8), bits)
    return int.from_bytes(bytes(packed.tolist()), "little")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("half", [False, True])
def test_every_code_in_every_place_is_its_number_but_for_the_unit(bits: int, half: bool) -> None:
    steps = 16 // bits
    unit = {(4, False): 126, (8, False): 120, (4, True): 14, (8, True): 8}[bits, half]
    generator = torch.Generator().manual_seed(0)
    for code, side, step in itertools.product(range(1 << bits), range(2), range(steps)):
        if bits == 8 and code & 127 == 127:
            continue  # NaN, which no weight is
        codes = torch.randint(0, 1 << bits, (2, steps), generator=generator).tolist()
        codes[side][step] = code
        pattern = floating_pair(word_of(codes, bits), step, bits, half) >> (16 * side) & 0xFFFF
        assert number(pattern, half) == meaning(code, bits) * 2.0**-unit


@pytest.mark.parametrize("bits", [4, 8])
def test_words_there_and_back(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (50, 2, 16 // bits), dtype=torch.uint8)
    assert torch.equal(floats.unpack_words(floats.pack_words(codes, bits), bits), codes)


def test_scales_there_and_back() -> None:
    scales = torch.randint(0, 256, (3, 5, 8, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(floats.unpack_scales(floats.pack_scales(scales)), scales)


@pytest.mark.parametrize("half", [False, True])
def test_products_with_nvfp4_scales_are_exact(half: bool) -> None:
    """Every code times every scale, multiplied in the type of the activations, times the factor of the row."""
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    stored, factors, nothing = floats.block_scales(scales.view(1, -1), 4)
    assert nothing[0].tolist() == [True] + [False] * 126
    kind = np.float16 if half else ml_dtypes.bfloat16
    words = [word_of([[0, 0, code, 0], [0, 0, 0, 0]], 4) for code in range(16)]
    numbers = [kind(number(floating_pair(word, 2, 4, half) & 0xFFFF, half)) for word in words]
    given, generator = scales.float().tolist(), torch.Generator().manual_seed(0)
    for index, place in itertools.product(range(1, 127), range(4)):
        scale, around = given[index], torch.randint(256, (4,), generator=generator).tolist()
        around[place] = int(stored[0, index])
        pattern = scale_pair(scale_word(around), place // 2, half) >> (16 * (place % 2)) & 0xFFFF
        times = kind(number(pattern, half))
        for code, value in enumerate(numbers):
            assert float(np.multiply(value, times)) * float(factors) == meaning(code, 4) * scale


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_less_what_lifts_the_inputs(bits: int) -> None:
    """`LIFT` and `LIFTED` of decode_tile.cuh: one token's inputs are times 2^64, which its scales lack."""
    assert number(0x5F80, False) == 2.0**64
    for byte in range(8, 248):
        word = scale_word([0, 0, 0, byte])
        lifted = rotated(word, 8) & 0x0FF00FF0 | 0x50005000
        assert number(lifted >> 16, False) * 2.0**64 == number(scale_pair(word, 1, False) >> 16, False)
        assert number(scale_pair(word, 1, False) >> 16, False) * 2.0 ** -(126 if bits == 4 else 120) == float(
            floats.stored_scales(torch.tensor([byte], dtype=torch.uint8), bits)
        )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("half", [False, True])
def test_powers_of_two_are_relative_to_the_largest_of_their_row(bits: int, half: bool) -> None:
    exponents = torch.tensor([[0, 20, 29, 30], [97, 117, 126, 127], [224, 244, 253, 254]], dtype=torch.uint8)
    stored, factors, nothing = floats.block_scales(exponents, bits)
    assert nothing.tolist() == [[True, False, False, False]] * 3
    unit = {(4, False): 126, (8, False): 120, (4, True): 14, (8, True): 8}[bits, half]
    for row, column in itertools.product(range(3), range(1, 4)):
        pattern = scale_pair(scale_word([int(stored[row, column]), 0, 0, 0]), 0, half) & 0xFFFF
        wanted = 2.0 ** (int(exponents[row, column]) - 127)
        assert number(pattern, half) * 2.0**-unit * float(factors[row]) == wanted


@pytest.mark.parametrize("bits", [4, 8])
def test_bytes_decode_to_what_kernels_see(bits: int) -> None:
    scale = torch.tensor([[0.001953125, 0.75, 3.5, 448.0]]).to(torch.float8_e4m3fn)
    stored, factors, _ = floats.block_scales(scale, bits)
    assert torch.equal(floats.stored_scales(stored, bits) * factors[:, None], scale.float())


def test_the_largest_numbers_fit_float16() -> None:
    """E4M3's largest code times the largest byte: beyond it, products in float16 would be infinite."""
    stored, _, _ = floats.block_scales(torch.tensor([[127]], dtype=torch.uint8), 8)
    scale = number(scale_pair(scale_word([int(stored), 0, 0, 0]), 0, True) & 0xFFFF, True)
    code = number(floating_pair(word_of([[0x7E, 0], [0, 0]], 8), 0, 8, True) & 0xFFFF, True)
    assert np.isfinite(np.float16(code) * np.float16(scale))


def test_values_of_codes() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert floats.values(codes, 4).tolist() == [meaning(code, 4) for code in range(16)]
