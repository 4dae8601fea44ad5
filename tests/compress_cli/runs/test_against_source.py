"""The two measures of distance from the source, against float64 and against known scales."""

from __future__ import annotations

import pytest
import torch

from compress_llm.compress_cli.runs.against_source import relative_error, rescaled_error


def test_relative_error_of_pieces_is_that_of_the_whole() -> None:
    weight = torch.randn(10, 7)
    decoded = weight + 0.1 * torch.randn(10, 7)
    pieces = relative_error((weight[a:b], decoded[a:b]) for a, b in ((0, 4), (4, 10)))
    exact = (weight.double() - decoded.double()).norm() / weight.double().norm()
    assert pieces == pytest.approx(float(exact), rel=1e-6)
    assert relative_error([(torch.zeros(2, 2), torch.zeros(2, 2))]) == 0


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_rescaled_error_sees_through_scales_of_rows_and_columns(noise: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 64)
    scaled = torch.rand(48, 1).add(0.2) * weight * torch.rand(1, 64).add(0.2)
    decoded = scaled + noise * scaled.norm() / scaled.numel() ** 0.5 * torch.randn(48, 64)
    error = relative_error([(scaled, decoded)])
    assert rescaled_error(weight, decoded) <= error / (1 - error) + 1e-6
    assert rescaled_error(weight, decoded) > 0.7 * error - 1e-6


def test_rescaled_error_of_another_weight_is_large() -> None:
    torch.manual_seed(0)
    assert rescaled_error(torch.randn(48, 64), torch.randn(48, 64)) > 0.7


def test_rescaled_error_takes_rows_and_columns_of_zeros() -> None:
    weight = torch.randn(8, 8)
    weight[2], weight[:, 3] = 0, 0
    assert rescaled_error(weight, 2 * weight) < 1e-6
    assert rescaled_error(weight, torch.zeros(8, 8)) == 0
