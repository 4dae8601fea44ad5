"""Sparse codes: what is stored, by hand, and how small it is; the round trip is tested with every other packing."""

from __future__ import annotations

import pytest
import torch

from compress_llm.formats.bitmap_codes import BitmapCodes
from compress_llm.formats.errors import InputError
from compress_llm.formats.rounded import QParams, Rounded
from compress_llm.formats.scheme import SCHEMES

SCHEME = SCHEMES["SPARSE50_W4A16"]
PACKING = BitmapCodes()


def half(rows: int, columns: int) -> Rounded:
    codes = torch.randint(-8, 8, (rows, columns)).to(torch.int8)
    codes[torch.rand(rows, columns) < 0.5] = 0
    return Rounded(SCHEME, codes, QParams(torch.ones(rows, columns // 128, dtype=torch.bfloat16)))


def test_codes_by_hand() -> None:
    codes = torch.tensor([[0, -8, 0, 7], [1, 0, 0, 0]], dtype=torch.int8)
    scheme = SCHEME.with_group("channel")
    tensors = PACKING.pack(Rounded(scheme, codes, QParams(torch.ones(2, 1, dtype=torch.bfloat16))))
    assert tensors["weight_bitmap"].tolist() == [[0b1010], [0b0001]]
    assert tensors["weight_packed"].tolist() == [0xF0, 0x09]
    assert torch.equal(PACKING.unpack(tensors, scheme, (2, 4)).codes, codes)


def test_size_at_half() -> None:
    tensors = PACKING.pack(half(128, 1024))
    assert sum(tensor.nbytes for tensor in tensors.values()) / (128 * 1024) <= 0.42


@pytest.mark.parametrize("change", ["fewer", "more"])
def test_codes_that_are_not_as_many_as_the_bitmap_says_are_refused(change: str) -> None:
    tensors = PACKING.pack(half(4, 128))
    packed = tensors["weight_packed"]
    tensors["weight_packed"] = packed[:-1] if change == "fewer" else torch.cat([packed, packed])
    with pytest.raises(InputError, match="weight_row_offsets: do not lead"):
        PACKING.unpack(tensors, SCHEME, (4, 128))
