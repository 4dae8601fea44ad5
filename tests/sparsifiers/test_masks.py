"""Exact counts, whatever the scores: also where all are equal."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress_llm.sparsifiers.masks import lowest, of_all, of_groups, of_rows


@settings(deadline=None, max_examples=60)
@given(rows=st.integers(1, 5), width=st.integers(1, 30), values=st.integers(1, 6), data=st.data())
def test_the_lowest_are_as_many_as_asked_for(rows: int, width: int, values: int, data: st.DataObject) -> None:
    score = torch.randint(0, values, (rows, width), generator=torch.Generator().manual_seed(width)).float()
    count = data.draw(st.integers(0, width))
    mask = lowest(score, count)
    for row, dropped in zip(score, mask, strict=True):
        wanted = set(sorted(range(width), key=lambda place: (row[place], place))[:count])
        assert set(dropped.nonzero().flatten().tolist()) == wanted


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.7])
def test_ratios_are_kept_by_row_and_over_all(ratio: float) -> None:
    score = torch.rand(6, 40)
    assert of_rows(score, ratio, None).sum(1).tolist() == [round(40 * ratio)] * 6
    assert int(of_all(score, ratio, None).sum()) == round(240 * ratio)
    assert float(score[of_all(score, ratio, None)].max()) < float(score[~of_all(score, ratio, None)].min())


@pytest.mark.parametrize("group", [(2, 4), (4, 8)])
def test_patterns_hold_in_every_group(group: tuple[int, int]) -> None:
    score = torch.zeros(3, 16)
    for mask in (of_groups(score, group), of_rows(torch.rand(3, 16), 0.5, group), of_all(score, 0.5, group)):
        assert (mask.view(3, -1, group[1]).sum(-1) == group[0]).all()
