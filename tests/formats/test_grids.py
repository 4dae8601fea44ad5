"""Integer grids against plain Python integers."""

import pytest
import torch

from compress_llm.formats.grids import INT4, INT8, IntGrid


@pytest.mark.parametrize(("grid", "lowest", "highest", "reach"), [(INT4, -8, 7, 7.5), (INT8, -128, 127, 127.5)])
def test_ends(grid, lowest, highest, reach):
    assert (grid.lowest, grid.highest, grid.reach) == (lowest, highest, reach)
    assert grid.name == f"int{grid.bits}"


@pytest.mark.parametrize("grid", [INT4, INT8, IntGrid(3)])
def test_every_code_survives_decoding_and_encoding(grid):
    codes = torch.arange(grid.lowest, grid.highest + 1).to(torch.int8)
    values = grid.decode(codes)
    assert values.dtype == torch.float32
    assert torch.equal(grid.encode(values), codes)


@pytest.mark.parametrize("grid", [INT4, INT8])
def test_encode_rounds_half_to_even_and_saturates(grid):
    inputs = [-1e38, grid.lowest - 0.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, grid.highest + 0.5, 1e38, float("inf")]
    expected = [min(max(round(x), grid.lowest), grid.highest) if abs(x) < 1e9 else None for x in inputs]
    expected = [grid.lowest, *expected[1:-2], grid.highest, grid.highest]
    assert grid.encode(torch.tensor(inputs)).tolist() == expected


def test_encode_leaves_its_input_alone():
    x = torch.tensor([0.4, 100.0])
    INT4.encode(x)
    assert torch.equal(x, torch.tensor([0.4, 100.0]))


def test_equal_grids_are_one_key():
    assert {IntGrid(4): 1}[INT4] == 1
