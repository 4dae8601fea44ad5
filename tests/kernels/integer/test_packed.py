"""Checkpoint tensors in fragment order decode to what the reference says, merged and in pieces."""

from __future__ import annotations

import pytest
import torch

from compress_llm.formats.packings import packing
from compress_llm.formats.rounded import QParams, Rounded, round_to_grid
from compress_llm.formats.scheme import SCHEMES, Scheme, scheme
from compress_llm.kernels.integer import packed
from compress_llm.kernels.integer.layout import dequantize
from compress_llm.kernels.integer.packed import Stored, arranged, misfit, pick_for
from compress_llm.kernels.reference import decode_rows


def stored(row: Scheme, shape: tuple[int, int], seed: int) -> Stored:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    groups = weight.reshape(shape[0], row.groups(shape[1]), -1)
    scale = (groups.abs().amax(-1) / row.grid.reach).to(torch.bfloat16)
    zero = None
    if not row.symmetric:
        zero = torch.randint(-3, 4, scale.shape, dtype=torch.int8, generator=generator)
        zero = zero.to(torch.bfloat16) + 0.5 if row.zero_dtype == "float" else zero
    rounded = round_to_grid(weight, row, QParams(scale, zero))
    static = row.activation is not None and not row.activation.dynamic
    whole = Rounded(row, rounded.codes, rounded.params, torch.tensor([0.5], dtype=torch.bfloat16) if static else None)
    return Stored(packing(row).pack(whole), shape)


@pytest.mark.parametrize("name", [name for name, row in SCHEMES.items() if row.rounds])
def test_merged_linears_decode_to_their_own_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "ROWS_AT_ONCE", 128)
    row = scheme(name).with_group(32) if scheme(name).group_size else scheme(name)
    linears = [stored(row, (rows, 160), rows) for rows in (40, 200, 8)]
    got = dequantize(arranged(row, linears, torch.bfloat16))
    expected = torch.cat([decode_rows(linear.tensors, row, linear.shape) for linear in linears])
    assert torch.equal(got, expected)


def test_what_has_no_layout_says_why() -> None:
    assert misfit(scheme("W4A16").with_group(16)) == "no layout for groups of 16"
    pick = pick_for(scheme("W4A16").with_group(16), (64, 64), 1, torch.bfloat16, torch.device("cpu"))
    assert (pick.name, pick.reason) == ("reference", "no layout for groups of 16")
    assert misfit(scheme("W8A8")) is None


def test_a_weight_has_rows() -> None:
    with pytest.raises(ValueError, match="without rows"):
        arranged(scheme("W4A16"), [], torch.bfloat16)
