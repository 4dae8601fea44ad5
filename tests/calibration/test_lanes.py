"""Staged runs: one forward pass, inputs as they are with the earlier stages already changed, clean failures."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from compress_llm.calibration.lanes import LaneError, StagedRun


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3, bias=False)
        self.b = nn.Linear(3, 2, bias=False)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.b(torch.tanh(self.a(x)))


def build() -> tuple[Two, list[Tensor]]:
    torch.manual_seed(0)
    return Two(), [torch.randn(4, 3) for _ in range(3)]


def test_each_stage_sees_the_weights_that_were_set_before_it() -> None:
    model, batches = build()
    original = model.b.weight.detach().clone()
    seen: list[list[Tensor]] = []

    def double(number: int, inputs: list[Tensor]) -> None:
        seen.append(inputs)
        module = (model.a, model.b)[number]
        module.weight = nn.Parameter(module.weight.detach() * 2)

    linears: dict[str, nn.Module] = {"a": model.a, "b": model.b}
    with torch.no_grad():
        results = StagedRun(linears, [("a",), ("b",)], double).run([lambda x=x: model(x) for x in batches])
    for x, at_a, at_b, result in zip(batches, *seen, results, strict=True):
        assert torch.equal(at_a, x)
        assert torch.equal(at_b, torch.tanh(model.a(x)))
        torch.testing.assert_close(result, at_b @ (2 * original).T)
    assert model.passes == len(batches)


def test_what_a_stage_raises_comes_out_and_no_thread_stays() -> None:
    model, batches = build()

    def fail(_number: int, _inputs: list[Tensor]) -> None:
        raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        StagedRun({"a": model.a}, [("a",)], fail).run([lambda x=x: model(x) for x in batches])
    assert threading.active_count() == before
    assert not model.a._forward_pre_hooks


def test_what_a_batch_raises_comes_out() -> None:
    model, batches = build()
    wrong = torch.randn(4, 5)
    with pytest.raises(RuntimeError, match="shapes"):
        StagedRun({"b": model.b}, [("b",)], lambda *_: None).run([lambda: model(batches[0]), lambda: model(wrong)])


def test_batches_that_take_different_ways_are_refused() -> None:
    model, batches = build()
    works = [lambda: model(batches[0]), lambda: batches[1]]
    with pytest.raises(LaneError):
        StagedRun({"a": model.a}, [("a",)], lambda *_: None).run(works)
