"""The scheme table and the two ways to vary a row."""

import pytest

from compress_llm.formats.errors import InputError
from compress_llm.formats.grids import INT4, INT8
from compress_llm.formats.scheme import SCHEMES, scheme


def test_rows_say_what_their_names_say():
    assert (SCHEMES["W4A16"].grid, SCHEMES["W4A16"].symmetric, SCHEMES["W4A16"].activation) == (INT4, True, None)
    assert not SCHEMES["W4A16_ASYM"].symmetric
    assert (SCHEMES["W8A16"].grid, SCHEMES["W8A16"].activation) == (INT8, None)
    dynamic, static = SCHEMES["W8A8"].activation, SCHEMES["W8A8_STATIC"].activation
    assert dynamic is not None
    assert static is not None
    assert (dynamic.grid, dynamic.granularity, dynamic.dynamic) == (INT8, "token", True)
    assert (static.grid, static.granularity, static.dynamic) == (INT8, "tensor", False)


@pytest.mark.parametrize("row", SCHEMES.values(), ids=lambda row: row.name)
def test_rows_are_consistent(row):
    assert SCHEMES[row.name] is row
    assert (row.strategy in ("group", "tensor_group", "block")) == (row.group_size is not None)
    assert (row.strategy == "block") == (row.block_rows > 1)
    assert (row.strategy == "tensor_group") == row.global_scale
    assert row.with_group(row.group_size) is row
    assert (row.name.endswith("_ASYM") or row.zero_dtype == "float") != row.symmetric
    assert hash(row) == hash(row.with_symmetry(row.symmetric))


@pytest.mark.parametrize(("name", "found"), [("w4a16", "W4A16"), ("INT8", "W8A8"), ("int4", "W4A16")])
def test_lookup_forgives_case_and_knows_aliases(name, found):
    assert scheme(name).name == found


def test_lookup_names_the_nearest():
    with pytest.raises(InputError, match="--scheme W4A61: no scheme has this name; did you mean 'W4A16'"):
        scheme("W4A61")


@pytest.mark.parametrize("size", [32, 24, 1])
def test_group_sizes(size):
    grouped = SCHEMES["W8A16"].with_group(size)
    assert (grouped.strategy, grouped.group_size, grouped.name) == ("group", size, "W8A16")
    assert (grouped.groups(size * 5), grouped.span(size * 5)) == (5, size)


@pytest.mark.parametrize("channel", ["channel", None])
def test_channel(channel):
    row = SCHEMES["W4A16"].with_group(channel)
    assert (row.strategy, row.group_size, row.groups(96), row.span(96)) == ("channel", None, 1, 96)
    assert SCHEMES["W8A8"].with_group(channel) == SCHEMES["W8A8"]


@pytest.mark.parametrize("size", [0, -1])
def test_a_group_size_below_one_is_refused(size):
    with pytest.raises(InputError, match=f"--group-size {size}: is not a group size"):
        SCHEMES["W4A16"].with_group(size)


def test_groups_are_refused_where_engines_know_only_channels():
    with pytest.raises(InputError, match="W8A8 has one scale an output row"):
        SCHEMES["W8A8"].with_group(64)


def test_one_scale_a_weight_is_not_one_a_row():
    with pytest.raises(InputError, match=r"rules: group_size channel: scheme FP8 has one scale a weight; leave it out"):
        SCHEMES["FP8"].with_group("channel", "rules: group_size")
    assert SCHEMES["FP8"].with_group(None) == SCHEMES["FP8"]


@pytest.mark.parametrize("name", ["NVFP4A16", "MXFP4", "FP8_BLOCK"])
@pytest.mark.parametrize("size", [64, "channel", None])
def test_blocks_are_of_the_size_that_engines_know(name, size):
    with pytest.raises(InputError, match=f"scheme {name} has groups of"):
        SCHEMES[name].with_group(size)


def test_rows_that_share_scales():
    assert [SCHEMES[name].sharing_rows(300) for name in ("FP8", "FP8_DYNAMIC", "FP8_BLOCK")] == [300, 1, 128]
    assert [SCHEMES[name].spans_tensor for name in ("FP8", "FP8_DYNAMIC", "NVFP4", "MXFP4")] == [
        True,
        False,
        True,
        False,
    ]


def test_inputs_have_a_rule_where_it_can_choose():
    row = SCHEMES["NVFP4"].with_input_rule("mse")
    assert row.activation.scale_rule == "mse" and row.with_input_rule(None) == row
    assert SCHEMES["NVFP4"].with_input_rule("max") == SCHEMES["NVFP4"]
    for name in ("NVFP4A16", "MXFP4", "W8A8"):
        with pytest.raises(InputError, match=f"--input-scale-rule mse: scheme {name} has no inputs in groups"):
            SCHEMES[name].with_input_rule("mse")
    with pytest.raises(InputError, match="--input-scale-rule msee: no rule has this name; did you mean 'mse'"):
        SCHEMES["NVFP4"].with_input_rule("msee")


def test_symmetry_renames():
    assert SCHEMES["W4A16"].with_symmetry(False) == SCHEMES["W4A16_ASYM"]
    assert SCHEMES["W4A16_ASYM"].with_symmetry(True) == SCHEMES["W4A16"]
    assert SCHEMES["W8A16"].with_symmetry(False).name == "W8A16_ASYM"


def test_zero_points_are_refused_where_the_layout_has_none():
    with pytest.raises(InputError, match="--asym: scheme W8A8 stores no zero points"):
        SCHEMES["W8A8"].with_symmetry(False)
