"""Timings: candidates alternate, medians count, and a floor is what bandwidth and operations allow."""

from __future__ import annotations

import pytest
import torch

from compress_llm.compress_cli.runs import timing
from compress_llm.compress_cli.runs.timing import Limits, copies, interleaved, limits

CPU = torch.device("cpu")


def test_slower_work_takes_longer_and_candidates_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def work(name: str, seconds: float) -> None:
        order.append(name)
        clock[0] += seconds

    calls = {
        "slow": [lambda: work("slow", 0.008)],
        "fast": [lambda: work("fast 1", 0.002), lambda: work("fast 2", 0.002)],
    }
    found = interleaved(calls, CPU, rounds=3)
    assert found["slow"].us == pytest.approx(8000)
    assert (found["fast"].low, found["fast"].us) == pytest.approx((2000, 2000))
    assert [name for name in order if name != "fast 2"] == ["slow", "fast 1"] + 3 * ["slow", "fast 1"]
    assert order.count("fast 2") == 3


def test_no_more_calls_than_allowed() -> None:
    count = [0]

    def call() -> None:
        count[0] += 1

    interleaved({"one": [call]}, CPU, rounds=2, most_calls=4)
    assert count[0] == 1 + 2 * 4


def test_floor_is_the_larger_of_the_two() -> None:
    can = Limits(bytes_per_second=1e9, operations_per_second=1e12)
    assert can.floor_us(2000, 1000) == pytest.approx(2.0)
    assert can.floor_us(2, 3_000_000) == pytest.approx(3.0)


def test_limits_are_measured() -> None:
    can = limits(CPU)
    assert 1e8 < can.bytes_per_second < 1e13
    assert 1e8 < can.operations_per_second < 1e15


def test_copies_outgrow_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    class About:
        L2_cache_size = 60_000_000

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: About)
    place = torch.device("cuda", 0)
    assert [copies(size, place) for size in (1, 10_000_000, 500_000_000)] == [timing.MOST_COPIES, 24, 6]
    assert copies(1, CPU) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs_of_a_gpu() -> None:
    a = torch.randn(2048, 2048, device="cuda")
    found = interleaved({"one": [lambda: a @ a], "two": [lambda: a @ a @ a]}, torch.device("cuda"), rounds=3)
    assert 1.5 < found["two"].us / found["one"].us < 2.5
