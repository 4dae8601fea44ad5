"""The grid of tiles covers a weight once, whatever its shape."""

import pytest

from compress_llm.formats.three_layer.tiles import Grid


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (64, 128), (65, 129), (130, 576)])
def test_columns_of_tiles_cover_every_group_once(rows, columns):
    grid = Grid(rows, columns)
    covered = list(grid.columns())
    assert [number for number, *_ in covered] == list(range(grid.across))
    assert grid.strips * 64 >= rows > (grid.strips - 1) * 64
    for part, unit in ((1, 4), (2, 1), (3, 2)):
        ends = [0, *(place[part].stop for place in covered)]
        assert [place[part].start for place in covered] == ends[:-1] and ends[-1] == unit * grid.groups


@pytest.mark.parametrize("shape", [(1, 1), (64, 128), (65, 129), (130, 260), (63, 127)])
def test_slots_of_a_tile_are_those_inside_the_weight(shape):
    grid = Grid(*shape)
    counted = [0] * grid.tiles
    for row in range(shape[0]):
        for group in range(grid.groups):
            counted[row // 64 * grid.across + group // 32] += 2
    assert grid.slots().tolist() == counted
