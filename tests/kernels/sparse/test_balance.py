"""Lanes stay within their window."""

from __future__ import annotations

import pytest
import torch

from compress_llm.kernels.sparse.balance import CHUNK, LANES, WINDOW, balance


def counts(kind: str, streams: int, steps: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(steps)
    if kind == "even":
        return torch.randint(2, (streams, steps, LANES, 32), generator=generator, dtype=torch.int32).sum(-1).int()
    if kind == "one lane":
        taken = torch.zeros(streams, steps, LANES, dtype=torch.int32)
        taken[..., 5] = 32
        return taken
    if kind == "half":
        return (torch.arange(LANES) % 2 * 32).expand(streams, steps, LANES).to(torch.int32)
    return torch.randint(0, 33, (streams, steps, LANES), generator=generator, dtype=torch.int32)


@pytest.mark.parametrize("kind", ["even", "one lane", "half", "any"])
@pytest.mark.parametrize("steps", [1, 2, 28])
def test_no_column_leaves_the_window(kind, steps) -> None:
    taken = counts(kind, 3, steps)
    plan = balance(taken)
    assert int(plan.waits.max()) <= 1
    assert bool((plan.zeros + taken <= 32).all())
    filled, arrived = torch.zeros(3, LANES, dtype=torch.int64), torch.zeros(3, 1, dtype=torch.int64)
    for step in range(steps):
        arrived += plan.waits[:, step, None]
        assert bool((filled >= CHUNK * (arrived - WINDOW)).all())
        column = (torch.arange(LANES) + plan.rotations[:, step, None]) % LANES
        filled.scatter_add_(1, column, (taken[:, step] + plan.zeros[:, step]).to(torch.int64))
        assert bool((filled <= CHUNK * arrived).all())
    assert torch.equal(filled.amax(1).to(torch.int32), plan.lengths)
    assert torch.equal(-(-plan.lengths // CHUNK), arrived.squeeze(1).to(torch.int32))


def test_rotations_save_most_of_the_padding() -> None:
    taken = counts("even", 8, 28)
    mean = taken.sum(1).float().mean(1)
    plain, turned = taken.sum(1).amax(1) / mean - 1, balance(taken).lengths / mean - 1
    assert float(turned.max()) < 0.02 < float(plain.min())
