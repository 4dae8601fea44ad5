"""Folding: with quantisation switched off the folded function is the original, for every kind of producer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress_llm.calibration.statistics import Stats
from compress_llm.quantizers import folding
from compress_llm.quantizers.method import LiveFeed, Source, Target

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def scales(width: int, seed: int = 5) -> Tensor:
    return random(width, seed=seed).mul(1.5).exp()


def seen(x: Tensor) -> Stats:
    stats = Stats()
    stats.add(x, ["second_moment", "abs_max", "abs_sum", "sample"])
    return stats


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("stored", [torch.float64, torch.bfloat16])
def test_norm_to_linears_keeps_the_function_whatever_the_norm_is_stored_in(offset: float, stored: torch.dtype) -> None:
    x, norm = random(40, 16), (random(16, seed=1) * 0.3).to(torch.bfloat16).double() + (1 - offset)
    norm = norm.to(torch.bfloat16).double()
    first, second = random(8, 16, seed=2), random(4, 16, seed=3)
    before = [x * (norm + offset) @ weight.T for weight in (first, second)]
    stats = seen(x * (norm + offset))
    feed = LiveFeed(
        Source("norm", "n", norm, offset=offset), [Target("a", first, None), Target("b", second, None)], stats
    )
    done = folding.apply(feed, scales(16), stored)
    assert torch.equal(norm, norm.to(stored).double())
    for weight, expected in zip((first, second), before, strict=True):
        torch.testing.assert_close(x * (norm + offset) @ weight.T, expected, **CLOSE)
    assert torch.allclose(done, scales(16).float(), rtol=0.01)
    again = seen(x * (norm + offset))
    for name in ("second_moment", "abs_max", "abs_sum", "sample"):
        torch.testing.assert_close(getattr(stats, name), getattr(again, name), rtol=1e-4, atol=1e-5)


def test_a_norm_that_cannot_be_stored_near_enough_is_left_alone() -> None:
    norm = torch.tensor([-1.0, -1 + 2**-7, 0.5], dtype=torch.float64)
    kept = norm.clone()
    done = folding.fold_norm(norm, 1.0, torch.tensor([2.0, 1.37, 2.0]), torch.bfloat16)
    assert norm[0] == kept[0] and done[0] == 1.0
    torch.testing.assert_close((norm + 1) * done, kept + 1, **CLOSE)


def test_a_bias_of_the_norm_is_divided_too() -> None:
    x, norm, bias, weight = random(30, 8), random(8, seed=1), random(8, seed=2), random(5, 8, seed=3)
    before = (x * norm + bias) @ weight.T
    feed = LiveFeed(Source("norm", "n", norm, bias), [Target("a", weight, None)], Stats())
    folding.apply(feed, scales(8), torch.bfloat16)
    torch.testing.assert_close((x * norm + bias) @ weight.T, before, **CLOSE)


def test_up_to_down_through_a_gate() -> None:
    x, up, down, gate = random(20, 6), random(12, 6, seed=1), random(6, 12, seed=2), random(20, 12, seed=3)
    bias = random(12, seed=4)
    before = (gate * (x @ up.T + bias)) @ down.T
    feed = LiveFeed(Source("linear", "up", up, bias), [Target("down", down, None)], Stats())
    folding.apply(feed, scales(12), torch.float32)
    torch.testing.assert_close((gate * (x @ up.T + bias)) @ down.T, before, **CLOSE)


@pytest.mark.parametrize("query", [4, 2, 6])
def test_value_to_output_with_grouped_query_heads(query: int) -> None:
    kv, size, width = 2, 3, 8
    shared = torch.arange(query).div(query // kv, rounding_mode="floor").mul(size)[:, None] + torch.arange(size)
    shared = shared.reshape(-1)
    fused = random(kv * size + 10, width)  # a fused qkv: the value rows are the last ones
    fused_before = fused.clone()
    v = fused[10:]
    out, x = random(width, query * size, seed=1), random(20, width, seed=2)
    mixing = random(20, 20, seed=3)

    def function() -> Tensor:
        values = mixing @ (x @ fused[10:].T)
        return values[:, shared] @ out.T

    before = function()
    stats = seen(random(9, query * size, seed=4))
    moment = stats.second_moment
    feed = LiveFeed(Source("linear", "qkv", v, shared=shared), [Target("o", out, None)], stats)
    done = folding.apply(feed, scales(kv * size), torch.float32)
    assert torch.equal(done, scales(kv * size).float()[shared])
    assert torch.equal(fused[:10], fused_before[:10])
    assert moment is not None and stats.second_moment is not None
    torch.testing.assert_close(stats.second_moment * torch.outer(done, done), moment, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(function(), before, **CLOSE)


def test_gathered_is_the_mean_over_the_channels_that_read_a_row() -> None:
    source = Source("linear", "v", torch.zeros(2, 4), shared=torch.tensor([0, 1, 0, 1]))
    assert folding.gathered(torch.tensor([1.0, 2.0, 3.0, 6.0]), source).tolist() == [2.0, 4.0]
    assert folding.spread(torch.tensor([5.0, 7.0]), source).tolist() == [5.0, 7.0, 5.0, 7.0]


def test_powers_of_two_round_nothing() -> None:
    x = random(100).to(torch.bfloat16)
    scale = folding.power_of_two(scales(100))
    assert torch.equal((x * scale.to(torch.bfloat16)) / scale.to(torch.bfloat16), x)
    assert bool((scale / scales(100) < 1.4143).all()) and bool((scale / scales(100) > 0.7071).all())


def test_a_feed_without_a_source_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to fold"):
        folding.apply(LiveFeed(None, [], Stats()), torch.ones(3), torch.float32)
