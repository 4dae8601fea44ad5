"""The two rounds of a search: what reaches the second, who judges it, and that doing nothing always takes part."""

from __future__ import annotations

from dataclasses import replace

import torch

from compress_llm.formats.scheme import SCHEMES
from compress_llm.kernels.hadamard import rotate
from compress_llm.quantizers.search import best_scale, floored, rounding_loss

W4 = SCHEMES["W4A16"].with_group(4)
PAIRS = [(torch.zeros(10, 4), W4), (torch.zeros(3, 4), W4)]
TRIALS = [torch.full((4,), float(i)) for i in range(6)]


def table(values: list[float]):
    """A loss that looks trials up by their first entry and notes how many rows it was shown."""
    seen: list[tuple[int, int, int]] = []

    def loss(pairs, scale) -> torch.Tensor:
        seen.append((int(scale[0]), pairs[0][0].shape[0], pairs[1][0].shape[0]))
        return torch.tensor(values[int(scale[0])])

    return loss, seen


def test_the_best_on_few_rows_are_judged_on_all() -> None:
    loss, seen = table([5.0, 4.0, 1.0, 3.0, 2.0, 9.0])
    assert best_scale(PAIRS, TRIALS, loss, 4, 2) == (2, 5.0, 1.0)
    assert [entry[0] for entry in seen] == [1, 2, 3, 4, 5, 0, 2, 4]
    assert {entry[1:] for entry in seen[:5]} == {(4, 3)}
    assert {entry[1:] for entry in seen[5:]} == {(10, 3)}


def test_no_change_wins_where_nothing_is_better_and_losses_that_are_not_numbers_lose() -> None:
    loss, _ = table([0.5, torch.nan, 1.0, torch.inf, 2.0, 3.0])
    assert best_scale(PAIRS, TRIALS, loss, 4, 9)[0] == 0


def test_rounding_loss_is_the_output_error_of_rounding_under_a_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(6, 8, generator=generator), torch.randn(50, 8, generator=generator)
    scale = torch.rand(8, generator=generator) + 0.5
    moved = (weight * scale).reshape(6, 2, 4)
    step = moved.abs().amax(-1, keepdim=True) / 7.5
    decoded = ((moved / step).round().clamp(-8, 7) * step).reshape(6, 8) / scale
    expected = ((decoded - weight) @ x.T).square().sum()
    torch.testing.assert_close(rounding_loss(weight, W4, scale, torch.float32, x.T @ x), expected, rtol=1e-4, atol=1e-4)
    energy = torch.rand(8, generator=generator)
    of_energy = rounding_loss(weight, W4, scale, torch.float32, energy)
    torch.testing.assert_close(of_energy, rounding_loss(weight, W4, scale, torch.float32, energy.diag()))


def test_the_floor_is_a_thousandth_of_the_mean() -> None:
    assert floored(torch.tensor([0.0, 2.0, 4.0])).tolist() == [torch.tensor(0.002).item(), 2.0, 4.0]
    assert bool((floored(torch.zeros(3)) > 0).all())


def test_rounding_loss_of_a_rotated_scheme_is_that_of_running_it_rotated() -> None:
    generator = torch.Generator().manual_seed(1)
    weight, x = torch.randn(6, 8, generator=generator), torch.randn(50, 8, generator=generator)
    scale, turned = torch.rand(8, generator=generator) + 0.5, replace(W4, rotation=8)
    moved = rotate(weight * scale, 8).reshape(6, 2, 4)
    step = moved.abs().amax(-1, keepdim=True) / 7.5
    decoded = ((moved / step).round().clamp(-8, 7) * step).reshape(6, 8)
    expected = (rotate(x / scale, 8) @ decoded.T - x @ weight.T).square().sum()
    found = rounding_loss(weight, turned, scale, torch.float32, x.T @ x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.isclose(found, rounding_loss(weight, W4, scale, torch.float32, x.T @ x), rtol=1e-2)
