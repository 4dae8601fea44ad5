"""Statistics against the same sums in float64."""

from __future__ import annotations

import torch

from compress_llm.calibration.statistics import Stats, output_error

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


def test_only_what_was_asked_for_is_kept() -> None:
    stats = Stats()
    stats.add(torch.ones(2, 3), frozenset({"abs_max"}))
    assert stats.second_moment is None and stats.abs_sum is None


def test_output_error_is_the_squared_error_of_the_outputs() -> None:
    generator = torch.Generator().manual_seed(1)
    x, error = torch.randn(7, 5, generator=generator), torch.randn(3, 5, generator=generator)
    expected = (x.double() @ error.double().T).square().sum()
    assert abs(output_error(error, x.T @ x) - float(expected)) < 1e-4 * float(expected)
