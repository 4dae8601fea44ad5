"""What codes mean, against float64 written out element by element."""

import pytest
import torch

from compress_llm.formats.rounded import QParams, Rounded, fake_quantize, round_to_grid
from compress_llm.formats.scheme import SCHEMES

SHAPE = (5, 24)


def sample(name: str, group: int | str, seed: int = 0):
    scheme = SCHEMES[name].with_group(group)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(SHAPE, generator=generator)
    groups = scheme.groups(SHAPE[1])
    scale = (torch.rand(SHAPE[0], groups, generator=generator) * 0.2 + 0.05).bfloat16()
    zero = None
    if not scheme.symmetric:
        zero = torch.randint(-8, 8, scale.shape, generator=generator).to(torch.int8)
    return scheme, weight, QParams(scale, zero)


@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM", "W8A16"])
@pytest.mark.parametrize("group", [8, 3, 24, "channel"])
def test_nearest_code_and_its_value_element_by_element(name, group):
    scheme, weight, params = sample(name, group)
    rounded = round_to_grid(weight, scheme, params)
    values = rounded.dequantize()
    assert (rounded.shape, rounded.codes.dtype, values.dtype) == (SHAPE, torch.int8, torch.float32)
    span = scheme.span(SHAPE[1])
    for row in range(SHAPE[0]):
        for column in range(SHAPE[1]):
            scale = float(params.scale[row, column // span])
            zero = 0 if params.zero is None else int(params.zero[row, column // span])
            allowed = [(code - zero) * scale for code in range(int(scheme.grid.lowest), int(scheme.grid.highest) + 1)]
            nearest = min(abs(value - float(weight[row, column])) for value in allowed)
            value = float(values[row, column])
            assert value == pytest.approx((int(rounded.codes[row, column]) - zero) * scale, rel=1e-7)
            assert abs(value - float(weight[row, column])) == pytest.approx(nearest, abs=1e-6)


@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM"])
def test_fake_quantize_is_round_and_back(name):
    scheme, weight, params = sample(name, 8, seed=1)
    before = weight.clone()
    assert torch.equal(fake_quantize(weight, scheme, params), round_to_grid(weight, scheme, params).dequantize())
    assert torch.equal(weight, before)


def test_spread_and_columns_agree():
    _, _, params = sample("W4A16_ASYM", 8)
    scale, zero = params.spread(SHAPE[1])
    assert zero is not None
    for group in range(3):
        part_scale, part_zero = params.columns(group)
        assert part_zero is not None
        assert torch.equal(scale[:, group * 8 : group * 8 + 8], part_scale.expand(-1, 8))
        assert torch.equal(zero[:, group * 8 : group * 8 + 8], part_zero.expand(-1, 8))


def test_dequantize_rounds_once():
    """(code - zero) · scale is exact in float32 and rounded to the target dtype at the end, not before."""
    scale = torch.tensor([[1.0078125]], dtype=torch.bfloat16)
    rounded = Rounded(SCHEMES["W8A16"], torch.tensor([[127, -128, 3]], dtype=torch.int8), QParams(scale))
    exact = torch.tensor([[127, -128, 3]], dtype=torch.float64) * scale.double()
    assert torch.equal(rounded.dequantize(), exact.float())
    assert torch.equal(rounded.dequantize(torch.bfloat16), exact.to(torch.bfloat16))


@pytest.mark.parametrize("name", [name for name, row in SCHEMES.items() if row.rounds])
def test_rows_are_rows_of_the_whole(random_rounded, name):
    rounded = random_rounded(SCHEMES[name], (9, 128))
    assert torch.equal(rounded.rows(1, 4).dequantize(), rounded.dequantize()[1:4])
