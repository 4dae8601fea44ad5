"""Real-valued zero points on disk: by hand, bit for bit, and what is refused."""

import pytest
import torch

from compress_llm.formats.errors import InputError
from compress_llm.formats.packings import packing
from compress_llm.formats.rounded import QParams, Rounded
from compress_llm.formats.scheme import SCHEMES
from compress_llm.kernels.reference import decode_rows

HQQ = SCHEMES["W4A16_HQQ"].with_group(4)


def by_hand() -> Rounded:
    codes = torch.tensor([[-8, 7, 0, 1, 2, 3, 4, 5], [7, 7, -1, -2, -3, -4, -5, -6]], dtype=torch.int8)
    scale = torch.tensor([[0.5, 2.0], [1.0, 0.25]], dtype=torch.bfloat16)
    zero = torch.tensor([[0.75, -9.5], [0.0, 3.25]], dtype=torch.bfloat16)
    return Rounded(HQQ, codes, QParams(scale, zero))


def test_words_scales_and_zeros_by_hand() -> None:
    tensors = packing(HQQ).pack(by_hand())
    assert tensors["weight_packed"].shape == (2, 1)
    assert int(tensors["weight_packed"][0, 0]) & 0xFFFFFFFF == 0xDCBA98F0
    assert tensors["weight_zero_point"].dtype == torch.bfloat16
    assert tensors["weight_zero_point"].tolist() == [[0.75, -9.5], [0.0, 3.25]]
    expected = [
        [-4.375, 3.125, -0.375, 0.125, 23.0, 25.0, 27.0, 29.0],
        [7, 7, -1, -2, -1.5625, -1.8125, -2.0625, -2.3125],
    ]
    assert by_hand().dequantize().tolist() == expected
    assert decode_rows(tensors, HQQ, (2, 8)).tolist() == expected


def test_a_weight_takes_four_bits_and_two_numbers_a_group() -> None:
    layout = packing(HQQ).layout(HQQ.with_group(64), 128, 256, torch.bfloat16)
    assert layout["weight_scale"] == layout["weight_zero_point"] == (torch.bfloat16, (128, 4))
    assert layout["weight_packed"] == (torch.int32, (128, 32))


def test_integer_zero_points_have_another_layout() -> None:
    integer = SCHEMES["W4A16_ASYM"].with_group(4)
    with pytest.raises(ValueError, match="integer zero points"):
        packing(HQQ).layout(integer, 8, 8, torch.bfloat16)
    with pytest.raises(ValueError, match="real-valued zero points"):
        packing(integer).layout(HQQ, 8, 8, torch.bfloat16)


def test_the_scheme_cannot_lose_its_zero_points() -> None:
    assert HQQ.with_symmetry(False) is HQQ
    with pytest.raises(InputError, match="always has zero points"):
        HQQ.with_symmetry(True)
