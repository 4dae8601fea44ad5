"""Pruned weights: the numbers themselves, down to the bits."""

import torch

from compress_llm.formats.pruned import Pruned, bits_of
from compress_llm.formats.scheme import SCHEMES


def test_rows_and_numbers_are_those_of_the_weight():
    weight = torch.randn(5, 7).to(torch.bfloat16)
    pruned = Pruned(SCHEMES["SPARSE50"], weight)
    assert pruned.shape == (5, 7)
    assert torch.equal(pruned.rows(1, 3).dequantize(), weight[1:3].float())


def test_bits_tell_the_two_zeros_apart():
    assert bits_of(torch.tensor([0.0, -0.0], dtype=torch.bfloat16)).tolist() == [0, -(1 << 15)]
    assert bits_of(torch.tensor([0.0, -0.0])).tolist() == [0, -(1 << 31)]
