"""Steps of four bits, against a decoder that goes byte by byte as the format page says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress_llm.formats.ragged import offsets_of
from compress_llm.formats.three_layer.steps import Moves, decode, encode, pair, reach


def walk(octets: list[int]) -> tuple[list[tuple[int, int]], int]:
    """(source, destination) of every entry of one tile, and the number of dummies."""
    source = destination = -1
    entries, dummies = [], 0
    for octet in octets:
        low, high = octet & 15, octet >> 4
        if low == 0 or high == 0:
            dummies += 1
            source, destination = (source + 15, destination + 15) if octet == 0 else (source + low, destination + high)
        else:
            source, destination = source + low, destination + high
            entries.append((source, destination))
    return entries, dummies


@settings(deadline=None, max_examples=80)
@given(st.lists(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), max_size=12), min_size=1, max_size=4))
def test_bytes_lead_to_the_slots_and_back(gaps: list[list[tuple[int, int]]]) -> None:
    wanted = []
    for tile in gaps:
        source = destination = -1
        wanted.append([(source := source + low, destination := destination + high) for low, high in tile])
    flat = [(number, *entry) for number, tile in enumerate(wanted) for entry in tile]
    columns = torch.tensor(flat, dtype=torch.int64).reshape(-1, 3).unbind(1)
    octets, counts = encode(Moves(*columns), len(gaps))
    parts = [part.tolist() for part in octets.split(counts.tolist())]
    assert [walk(part)[0] for part in parts] == wanted
    fewest = sum(max((low - 1) // 15, (high - 1) // 15) for tile in gaps for low, high in tile)
    assert sum(walk(part)[1] for part in parts) == fewest
    last = [[tile[-1][stream] + 1 if tile else 0 for tile in wanted] for stream in (0, 1)]
    assert reach(octets, offsets_of(counts)).tolist() == last
    back = decode(octets, counts)
    assert all(
        torch.equal(one, other) for one, other in zip((back.tile, back.source, back.destination), columns, strict=True)
    )


def test_the_kth_empty_slot_takes_the_kth_surplus() -> None:
    empty = torch.tensor([[0, 1, 0, 1, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    surplus = torch.tensor([[1, 0, 0, 0, 1], [0, 1, 1, 0, 0], [0, 0, 1, 0, 0]], dtype=torch.bool)
    moves, left = pair(empty, surplus)
    assert list(zip(*(part.tolist() for part in (moves.tile, moves.source, moves.destination)), strict=True)) == [
        (0, 1, 0),
        (0, 3, 4),
        (1, 0, 1),
    ]
    assert left.nonzero().tolist() == [[1, 2], [2, 2]]


@pytest.mark.parametrize(("step", "octets"), [(15, [0xFF]), (16, [0x00, 0x11]), (31, [0x00, 0x00, 0x11])])
def test_long_steps_take_dummies(step: int, octets: list[int]) -> None:
    place = torch.tensor([step - 1])
    found, counts = encode(Moves(torch.tensor([0]), place, place), 1)
    assert found.tolist() == octets and counts.tolist() == [len(octets)]
    one_sided, _ = encode(Moves(torch.tensor([0]), place, torch.tensor([2])), 1)
    assert one_sided.tolist() == [0x0F] * (len(octets) - 1) + [(3 << 4) | (step - 15 * (len(octets) - 1))]
