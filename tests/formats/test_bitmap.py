"""The bitmap layout: exact for every weight, and strict with what is read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from compress_llm.formats.bitmap import Bitmap, check_mask
from compress_llm.formats.errors import InputError
from compress_llm.formats.layout import held_to
from compress_llm.formats.pruned import Pruned
from compress_llm.formats.ragged import offsets_of
from compress_llm.formats.scheme import SCHEMES

from .sparse_weights import ADVERSARIAL, adversarial, any_weight, random_weight, same_bits

SCHEME = SCHEMES["SPARSE50"].with_layout("bitmap")
PACKING = Bitmap()


def round_trip(weight: Tensor) -> dict[str, Tensor]:
    tensors = PACKING.pack(Pruned(SCHEME, weight))
    shape = (weight.shape[0], weight.shape[1])
    held_to(tensors, PACKING.layout(SCHEME, *shape, weight.dtype))
    assert same_bits(PACKING.unpack(tensors, SCHEME, shape).weight, weight)
    return tensors


@settings(deadline=None, max_examples=40)
@given(weight=any_weight())
def test_unpacking_inverts_packing(weight: Tensor) -> None:
    round_trip(weight)


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_masks(name: str) -> None:
    round_trip(adversarial(name))


def test_bits_and_values_by_hand() -> None:
    weight = torch.zeros(2, 10, dtype=torch.bfloat16)
    weight[0, 1], weight[0, 9], weight[1, 0] = 1, 2, 3
    tensors = round_trip(weight)
    assert tensors["weight_bitmap"].tolist() == [[2, 2], [1, 0]]
    assert tensors["weight_values"].tolist() == [1, 2, 3]
    assert tensors["weight_row_offsets"].tolist() == [0, 2, 3]


def test_size_at_half() -> None:
    weight = torch.ones(64, 4096, dtype=torch.bfloat16).masked_fill(torch.arange(4096) % 2 == 0, 0.0)
    assert sum(tensor.nbytes for tensor in round_trip(weight).values()) / weight.numel() < 1.128


@pytest.mark.parametrize(
    ("suffix", "key"), [("weight_bitmap", "weight_bitmap"), ("weight_row_offsets", "weight_row_offsets")]
)
def test_a_bitmap_at_odds_with_its_offsets_is_refused(suffix: str, key: str) -> None:
    tensors = PACKING.pack(Pruned(SCHEME, random_weight((5, 12), 0.5)))
    tensors[suffix] = tensors[suffix] + 1
    with pytest.raises(InputError) as caught:
        PACKING.unpack(tensors, SCHEME, (5, 12))
    assert caught.value.key == key


def test_bits_behind_the_last_column_are_refused() -> None:
    tensors = PACKING.pack(Pruned(SCHEME, random_weight((5, 12), 0.5)))
    tensors["weight_bitmap"][0, 1] |= 128
    with pytest.raises(InputError, match="weight_bitmap"):
        PACKING.unpack(tensors, SCHEME, (5, 12))


@pytest.mark.parametrize("fill", [0x00, 0xFF])
def test_a_bitmap_that_was_overwritten_is_refused_without_the_weight(fill: int) -> None:
    tensors = PACKING.pack(Pruned(SCHEME, random_weight((5, 16), 0.5)))
    PACKING.check_contents(tensors, SCHEME, (5, 16))
    tensors["weight_bitmap"].fill_(fill)
    with pytest.raises(InputError, match="weight_bitmap: and weight_row_offsets differ; use a whole copy"):
        PACKING.check_contents(tensors, SCHEME, (5, 16))


def test_every_byte_of_a_bitmap_is_counted_right() -> None:
    octets = torch.arange(256, dtype=torch.uint8)[:, None]
    counts = [number.bit_count() for number in range(256)]
    tensors = {"weight_bitmap": octets, "weight_row_offsets": offsets_of(torch.tensor(counts))}
    check_mask({**tensors, "flat": torch.empty(sum(counts))}, (256, 8), "flat")
    for row in range(256):
        wrong = octets.clone()
        wrong[row] ^= 16
        with pytest.raises(InputError, match="weight_bitmap"):
            check_mask({**tensors, "weight_bitmap": wrong, "flat": torch.empty(sum(counts))}, (256, 8), "flat")
