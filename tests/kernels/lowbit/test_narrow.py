"""The order of 8-bit inputs is that in which 4-bit weights are unpacked, and codes stand for what they came from."""

from __future__ import annotations

import pytest
import torch

from compress_llm.formats.scheme import SCHEMES
from compress_llm.kernels.activations import quantize_activation
from compress_llm.kernels.lowbit import narrow, ops
from compress_llm.kernels.lowbit.layout import arrange_narrow


def unpacked(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The even and the odd 4-bit codes of int64 words, as the kernel masks them out: words of a code a byte."""
    return words & 0x0F0F0F0F, words >> 4 & 0x0F0F0F0F


def test_inputs_follow_the_weights(sample) -> None:
    weight = sample(136, 256, 4, 128)
    words = weight.arranged.codes.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    even, odd = unpacked(words.unflatten(-1, (2, 2)))  # [row tile, block, tile, piece, lane, columns' half, rows' half]
    registers = torch.stack((even, odd), -2)  # ... lane, matrix step within the piece, columns' half, rows' half
    steps = registers.permute(0, 1, 2, 3, 5, 4, 6, 7).flatten(3, 4).flatten(5, 6).to(torch.int32).contiguous()
    codes = steps.view(torch.uint8).view(torch.int8) - 8
    expected = arrange_narrow(narrow.shuffled(weight.codes), torch.ones(136, 1)).codes.view(torch.int8)
    assert torch.equal(codes[1, :, 0, :, :4], expected[1, :, 0, :, :4])  # rows beyond the last are padding
    assert torch.equal(codes[0], expected[0])


def test_4_bit_codes_become_8_bit_numbers_by_masks() -> None:
    word, numbers = 0, list(range(16))
    for half in (numbers[:8], numbers[8:]):
        word = sum(code << 4 * place for place, code in enumerate(half))
        below = ~word >> 3 & 0x11111111
        size = ((word ^ below * 7) & 0x77777777) + below
        signs = (~word << 4 & 0x80808080, ~word & 0x80808080)
        floats = (size & 0x0F0F0F0F | signs[0], size >> 4 & 0x0F0F0F0F | signs[1])
        integers = ((word << 4 ^ 0x88888888) & 0xF0F0F0F0, (word ^ 0x88888888) & 0xF0F0F0F0)
        for odd in (0, 1):
            expected = torch.tensor(half[odd::2], dtype=torch.float32) - 8
            raw = torch.tensor(list(floats[odd].to_bytes(4, "little")), dtype=torch.uint8)
            assert torch.equal(raw.view(torch.float8_e4m3fn).float() * 512, expected)
            raw = torch.tensor(list(integers[odd].to_bytes(4, "little")), dtype=torch.uint8)
            assert torch.equal(raw.view(torch.int8).float() / 16, expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_there_and_back(dtype) -> None:
    x = torch.arange(-128, 128).repeat(2, 1).to(torch.int8).view(dtype)
    assert torch.equal(narrow.natural(narrow.shuffled(x)).view(torch.uint8), x.view(torch.uint8))
    assert not torch.equal(narrow.shuffled(x).view(torch.uint8), x.view(torch.uint8))


@pytest.mark.parametrize("name", ["W8A8_BLOCK", "FP8_BLOCK", "W4A8", "W4AFP8"])
def test_values_are_those_of_the_reference(name: str) -> None:
    scheme, x = SCHEMES[name], torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    group = 128 if scheme.grid.bits == 8 else 0
    codes, scale = ops.quantize_blocks(x, group, scheme.activation.grid.name == "e4m3")
    seen = narrow.values(codes, scale, scheme.grid.bits)
    assert torch.equal(seen.float(), quantize_activation(x, scheme.activation))


def test_numbers_that_are_not_coded_are_themselves() -> None:
    x = torch.randn(2, 128).bfloat16()
    assert torch.equal(narrow.values(x, None, 4), x.double())


def test_rows_of_scales_are_whole_pieces() -> None:
    assert [narrow.pitch(tokens) for tokens in (0, 1, 4, 5, 129)] == [0, 4, 4, 8, 132]
