"""Statistics against the same sums in float64."""

from __future__ import annotations

import pytest
import torch

from compress_llm.calibration.statistics import SAMPLE_ROWS, Stats, output_error

FIELDS = frozenset({"abs_max", "abs_sum", "second_moment"})


def test_batches_add_up_to_the_sums_over_all_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 4, generator=generator)
    stats = Stats()
    for batch in x:
        stats.add(batch, FIELDS)
    rows = x.double().reshape(-1, 4)
    assert stats.tokens == 15
    torch.testing.assert_close(stats.second_moment.double(), rows.T @ rows, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.abs_sum.double(), rows.abs().sum(0), rtol=1e-6, atol=1e-6)
    assert torch.equal(stats.abs_max.double(), rows.abs().amax(0))


def test_padding_counts_for_nothing() -> None:
    x = torch.tensor([[[1.0, 2.0], [100.0, 100.0]], [[3.0, 4.0], [5.0, 6.0]]])
    keep = torch.tensor([[True, False], [True, True]])
    stats = Stats()
    stats.add(x, FIELDS, keep)
    assert stats.tokens == 3
    assert stats.abs_max.tolist() == [5.0, 6.0]
    assert stats.second_moment.tolist() == [[35.0, 44.0], [44.0, 56.0]]


def test_merging_equals_seeing_everything() -> None:
    x = torch.arange(12.0).reshape(6, 2)
    whole, first, second = Stats(), Stats(), Stats()
    whole.add(x, FIELDS)
    first.add(x[:2], FIELDS)
    second.add(x[2:], FIELDS)
    merged = first.merge(second)
    assert merged.tokens == whole.tokens
    for name in FIELDS:
        assert torch.equal(getattr(merged, name), getattr(whole, name))


def test_a_side_that_saw_nothing_takes_nothing_away() -> None:
    full, empty = Stats(), Stats()
    full.add(torch.tensor([[1.0, 2.0]]), FIELDS | {"sample"})
    for merged in (full.merge(empty), empty.merge(full)):
        assert merged.tokens == 1
        assert merged.second_moment.tolist() == [[1.0, 2.0], [2.0, 4.0]]
        assert merged.sample.tolist() == [[1.0, 2.0]]


def test_only_what_was_asked_for_is_kept() -> None:
    stats = Stats()
    stats.add(torch.ones(2, 3), frozenset({"abs_max"}))
    assert stats.second_moment is None and stats.abs_sum is None


def test_output_error_is_the_squared_error_of_the_outputs() -> None:
    generator = torch.Generator().manual_seed(1)
    x, error = torch.randn(7, 5, generator=generator), torch.randn(3, 5, generator=generator)
    expected = (x.double() @ error.double().T).square().sum()
    assert abs(output_error(error, x.T @ x) - float(expected)) < 1e-4 * float(expected)


@pytest.mark.parametrize("width", [5, 256, 600])
def test_wide_second_moments_are_summed_in_tiles_and_stay_symmetric(width: int) -> None:
    generator = torch.Generator().manual_seed(2)
    stats, rows = Stats(), torch.randn(40, width, generator=generator)
    for batch in rows.split(13):
        stats.add(batch, frozenset({"second_moment"}))
    expected = rows.double().T @ rows.double()
    torch.testing.assert_close(stats.second_moment.double(), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(stats.second_moment, stats.second_moment.T)


@pytest.mark.parametrize("batch", [1, 7, 100, 5000])
def test_the_sample_is_every_strideth_row_however_the_rows_come(batch: int) -> None:
    rows = torch.arange(5000.0).unsqueeze(1)
    stats = Stats()
    for part in rows.split(batch):
        stats.add(part, frozenset({"sample"}))
    assert stats.sample is not None
    assert stats.stride == 8
    assert torch.equal(stats.sample, rows[::8])


def test_samples_merge_at_the_coarser_stride() -> None:
    first, second = Stats(), Stats()
    first.add(torch.arange(2000.0).unsqueeze(1), frozenset({"sample"}))
    second.add(torch.arange(10.0).unsqueeze(1), frozenset({"sample"}))
    merged = first.merge(second)
    assert merged.sample is not None
    assert merged.sample.shape[0] <= SAMPLE_ROWS
    assert merged.stride == 2
    assert merged.sample[-5:, 0].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]


def test_rescaling_gives_the_statistics_of_the_divided_inputs() -> None:
    generator = torch.Generator().manual_seed(3)
    x, scale = torch.randn(30, 6, generator=generator), torch.rand(6, generator=generator) + 0.5
    fields = frozenset({*FIELDS, "sample"})
    stats, divided = Stats(), Stats()
    stats.add(x, fields)
    divided.add(x / scale, fields)
    stats.memo["factor"] = 1
    stats.rescale(scale)
    for name in fields:
        torch.testing.assert_close(getattr(stats, name), getattr(divided, name), rtol=1e-5, atol=1e-5)
    assert not stats.memo


def test_what_was_derived_is_forgotten_when_more_is_seen() -> None:
    stats = Stats()
    stats.memo["factor"] = 1
    stats.add(torch.ones(1, 3), FIELDS)
    assert not stats.memo
