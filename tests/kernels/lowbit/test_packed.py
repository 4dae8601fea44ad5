"""Checkpoint tensors in fragment order decode to what the reference says, merged and in pieces."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compress_llm.compress_cli.runs.bench_kernels import random_weight
from compress_llm.formats.errors import InputError
from compress_llm.formats.scheme import SCHEMES, Scheme, scheme
from compress_llm.kernels.lowbit import packed
from compress_llm.kernels.lowbit.layout import dequantize
from compress_llm.kernels.lowbit.packed import Stored, arranged, misfit, pick_for
from compress_llm.kernels.reference import decode_rows


def stored(row: Scheme, shape: tuple[int, int]) -> Stored:
    return Stored(random_weight(row, shape, torch.bfloat16, torch.device("cpu")), shape)


@pytest.mark.parametrize("name", [name for name, row in SCHEMES.items() if misfit(row) is None])
def test_merged_linears_decode_to_their_own_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "ROWS_AT_ONCE", 128)
    row = scheme(name).with_group(32) if scheme(name).groupable and scheme(name).group_size else scheme(name)
    columns = 256 if row.group_size == 128 else 160
    linears = [stored(row, (rows, columns)) for rows in ((128, 256, 8) if row.block_rows > 1 else (40, 200, 8))]
    got = dequantize(arranged(row, linears, torch.bfloat16))
    expected = torch.cat([decode_rows(linear.tensors, row, linear.shape) for linear in linears])
    if row.global_scale:  # what divides the scales of blocks there multiplies rows here
        assert torch.allclose(got, expected, rtol=2**-22, atol=0)
    else:
        assert torch.equal(got, expected)


def test_what_has_no_layout_says_why() -> None:
    assert misfit(scheme("W4A16").with_group(16)) == "no layout for groups of 16"
    pick = pick_for(scheme("W4A16").with_group(16), (64, 64), 1, torch.bfloat16, torch.device("cpu"))
    assert (pick.name, pick.reason) == ("reference", "no layout for groups of 16")
    assert pick.others == dict.fromkeys(("cuda", "triton", "scaled", "three-layer"), "no layout for groups of 16")
    with pytest.raises(InputError, match="kernel 'triton': it cannot run here .no layout for groups of 16.; name"):
        pick_for(scheme("W4A16").with_group(16), (64, 64), 1, torch.bfloat16, torch.device("cpu"), "triton")
    assert misfit(scheme("W8A8")) is None
    assert misfit(scheme("FP8_BLOCK")) is None
    weights_only = replace(scheme("FP8_BLOCK"), activation=None)
    assert misfit(weights_only) == "no layout for e4m3 with scales of 128 inputs like these"


def test_which_products_have_8_bit_activations() -> None:
    assert [name for name, row in SCHEMES.items() if packed.narrow(row)] == [
        "W8A8",
        "W8A8_STATIC",
        "W8A8_BLOCK",
        "FP8",
        "FP8_DYNAMIC",
        "FP8_BLOCK",
    ]


def test_a_weight_has_rows() -> None:
    with pytest.raises(ValueError, match="without rows"):
        arranged(scheme("W4A16"), [], torch.bfloat16)


def test_blocks_of_rows_end_where_linears_do() -> None:
    linears = [stored(scheme("FP8_BLOCK"), (rows, 128)) for rows in (136, 128)]
    with pytest.raises(ValueError, match="ends within a block of 128 rows"):
        arranged(scheme("FP8_BLOCK"), linears, torch.bfloat16)
