"""How weights are cut."""

from __future__ import annotations

import pytest

from compress_llm.kernels.sparse.geometry import Geometry, geometry, read


@pytest.mark.parametrize(
    ("shape", "cut"),
    [
        ((14336, 4096), (16, 4, 7, 7, 1)),
        ((4096, 14336), (16, 14, 2, 2, 2)),
        ((8192, 8192), (16, 8, 4, 4, 2)),
        ((4104, 4160), (13, 5, 2, 2, 1)),
    ],
)
def test_cuts_of_large_weights(shape, cut) -> None:
    assert geometry(*shape) == Geometry(*cut)
    assert geometry(*shape).bands(shape[0]) <= 132


@pytest.mark.parametrize("rows", [1, 16, 100, 576, 1024, 28672])
@pytest.mark.parametrize("columns", [1, 64, 200, 576, 4096, 14336])
def test_every_weight_is_covered(rows, columns) -> None:
    cut = geometry(rows, columns)
    assert cut.inputs >= columns
    assert cut.bands(rows) * cut.rows >= rows > (cut.bands(rows) - 1) * cut.rows
    assert read(cut.numbers()) == cut
    assert cut.warps == 1 or cut.steps >= 8
    assert cut.valid


CUTS = [
    Geometry(1, 4, 5, 2, 2),
    Geometry(2, 3, 2, 2, 1),
    Geometry(2, 2, 1, 1, 2),
    Geometry(1, 4, 7, 7, 1),
    Geometry(1, 4, 7, 4, 2),
    Geometry(1, 4, 4, 4, 2),
]


@pytest.mark.parametrize("cut", CUTS)
def test_steps_go_through_all_tiles_and_groups(cut) -> None:
    order, slots = cut.order(), cut.slots()
    assert sorted(order) == [(tile, group) for tile in range(cut.tiles) for group in range(cut.groups)]
    assert len(set(slots)) == len(slots) == cut.steps
    assert max(slots) < 4 * cut.words * cut.blocks
    assert max(slots) >= 4 * (cut.words * (cut.blocks - 1))
    assert slots == sorted(slots)


def test_order_of_an_odd_number_of_tiles() -> None:
    cut = Geometry(1, 2, 3, 2, 2)
    assert cut.order() == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    assert cut.slots() == [0, 1, 2, 3, 4, 5]


def test_blocks_of_more_than_four_steps() -> None:
    cut = Geometry(1, 2, 5, 5, 1)
    assert cut.order() == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (0, 1), (1, 1), (2, 1), (3, 1), (4, 1)]
    assert cut.words == 2
    assert cut.slots() == [0, 1, 2, 3, 4, 8, 9, 10, 11, 12]


def test_numbers_that_do_not_go_together() -> None:
    for cut in (Geometry(1, 3, 2, 2, 2), Geometry(1, 3, 2, 3, 1), Geometry(1, 2, 5, 5, 2), Geometry(1, 3, 2, 2, 3)):
        assert not cut.valid
