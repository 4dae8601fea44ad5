"""The factor that column-by-column methods share, against what it stands for."""

from __future__ import annotations

import pytest
import torch

from compress_llm.calibration import factor
from compress_llm.calibration.factor import factorize, left_over
from compress_llm.formats.errors import InputError


def second_moment(width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    mix = torch.eye(width) + 0.2 * torch.randn(width, width, generator=generator)
    x = torch.randn(512, width, generator=generator) @ mix * torch.linspace(0.3, 2, width)
    return x.T @ x


def test_float64_takes_over_where_float32_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = second_moment(64)
    tried: list[torch.dtype] = []
    real = factor._inverse_root

    def failing(hessian: torch.Tensor) -> tuple[torch.Tensor, bool]:
        tried.append(hessian.dtype)
        return real(hessian)[0], hessian.dtype == torch.float32

    expected = factorize(moment, 0.01, True)
    monkeypatch.setattr(factor, "_inverse_root", failing)
    found = factorize(moment, 0.01, True)
    assert tried == [torch.float32, torch.float64]
    assert torch.allclose(found.unit, expected.unit, atol=1e-4)


def test_statistics_that_are_not_finite_are_refused() -> None:
    with pytest.raises(InputError, match="not positive definite"):
        factorize(torch.full((8, 8), torch.nan), 0.01, True)


@pytest.mark.parametrize("act_order", [True, False])
def test_left_over_energy_is_what_later_inputs_do_not_explain(act_order: bool) -> None:
    moment = second_moment(12)
    damped = moment.double() + 0.1 * moment.diagonal().mean() * torch.eye(12)
    found = factorize(moment, 0.1, act_order)
    for place, j in enumerate(found.order.tolist()):
        later = found.order[place + 1 :]
        explained = damped[j, later] @ torch.linalg.solve(damped[later][:, later], damped[later, j])
        assert float(found.energy[place]) == pytest.approx(float(damped[j, j] - explained), rel=1e-4)
    if act_order:
        assert torch.equal(left_over(moment, 0.1)[found.order], found.energy)
