"""Where in a byte a four-bit code lies, and that nothing wider gets in."""

from __future__ import annotations

import pytest
import torch

from compress_llm.formats.bits import pack_nibbles, unpack_nibbles
from compress_llm.formats.packings import packing
from compress_llm.formats.scheme import SCHEMES


def test_the_first_code_of_a_pair_is_in_the_low_half():
    codes = torch.tensor([[1, 2, 15, 0], [0, 9, 7, 8]], dtype=torch.int8)
    packed = pack_nibbles(codes)
    assert packed.tolist() == [[0x21, 0x0F], [0x90, 0x87]]
    assert torch.equal(unpack_nibbles(packed), codes)


@pytest.mark.parametrize(
    "codes",
    [
        torch.tensor([[1, 16]], dtype=torch.int8),
        torch.tensor([[-1, 1]], dtype=torch.int8),
        torch.tensor([[1, 2, 3]], dtype=torch.int8),
        torch.tensor([[1, 2]], dtype=torch.int16),
        torch.tensor([1, 2], dtype=torch.int8),
    ],
)
def test_what_is_no_pair_of_codes_is_refused(codes):
    with pytest.raises(ValueError, match="codes"):
        pack_nibbles(codes)


@pytest.mark.parametrize("name", ["NVFP4A16", "MXFP4A16"])
def test_what_is_packed_is_what_was_given(random_rounded, name):
    rounded = random_rounded(SCHEMES[name], (5, 96))
    tensors = packing(rounded.scheme).pack(rounded)
    assert torch.equal(unpack_nibbles(tensors["weight_packed"]), rounded.codes)
