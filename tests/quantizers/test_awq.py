"""AWQ: what the search is judged by, that it never loses, and that folding its result keeps the function."""

from __future__ import annotations

import pytest
import torch

from compress_llm.calibration.statistics import Stats, output_error
from compress_llm.formats.errors import InputError
from compress_llm.formats.rounded import fake_quantize
from compress_llm.formats.scheme import SCHEMES
from compress_llm.quantizers.awq import AWQ, awq, search_scale
from compress_llm.quantizers.gptq import GPTQ
from compress_llm.quantizers.method import LiveFeed, Source, Target
from compress_llm.quantizers.rtn import RTN
from compress_llm.quantizers.scales import choose

W4 = SCHEMES["W4A16"].with_group(16)


def outlier_case(out: int = 24, width: int = 64, seed: int = 0) -> tuple[torch.Tensor, Stats]:
    """Inputs of which a few channels carry most of the energy: what AWQ was made for."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(400, width, generator=generator)
    x[:, ::9] *= 20
    stats = Stats()
    stats.add(x, ["second_moment", "abs_max", "sample"])
    return torch.randn(out, width, generator=generator) * 0.05, stats


def lost(weight: torch.Tensor, scale: torch.Tensor, stats: Stats) -> float:
    scaled = weight * scale
    decoded = fake_quantize(scaled, W4, choose(scaled, W4, "minmax", torch.bfloat16)) / scale
    assert stats.second_moment is not None
    return output_error(decoded - weight, stats.second_moment) / stats.tokens


def test_outlier_channels_are_scaled_up_and_the_loss_falls() -> None:
    weight, stats = outlier_case()
    scale, record = search_scale([weight], [W4], stats, torch.bfloat16, AWQ.options)
    assert lost(weight, scale, stats) < 0.75 * lost(weight, torch.ones(64), stats)
    assert record["error_after"] == pytest.approx(lost(weight, scale, stats), rel=1e-3)
    assert record["error_before"] == pytest.approx(lost(weight, torch.ones(64), stats), rel=1e-3)
    assert float(scale[::9].min()) > float(scale.median())
    assert float(scale.max() * scale.min()) == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_never_worse_than_no_scale_even_when_few_rows_mislead(seed: int) -> None:
    weight, stats = outlier_case(out=40, seed=seed)
    weight[1::2] *= 30  # the coarse pass sees even rows only
    options = {**AWQ.options, "rows": 2, "finalists": 1}
    scale, _ = search_scale([weight], [W4], stats, torch.bfloat16, options)
    assert lost(weight, scale, stats) <= lost(weight, torch.ones(64), stats) * (1 + 1e-5)


def test_weights_on_the_grid_need_no_scale() -> None:
    _, stats = outlier_case()
    weight = torch.tensor([-7.5, 7.5, 1.0, -4.0] * 16).repeat(8, 1).round()
    weight[:, ::4] = -8.0
    weight[:, 1::4] = 7.0
    scale, record = search_scale([weight * 0.9375], [W4], stats, torch.float32, AWQ.options)
    assert record["error_after"] <= record["error_before"]
    assert scale.shape == (64,)


def test_linears_of_one_input_are_judged_together() -> None:
    (first, stats), (second, _) = outlier_case(), outlier_case(out=8, seed=4)
    both, record = search_scale([first, second], [W4, W4], stats, torch.bfloat16, AWQ.options)
    total = lost(first, both, stats) + lost(second, both, stats)
    assert record["error_after"] == pytest.approx(total, rel=1e-3)
    assert total < lost(first, torch.ones(64), stats) + lost(second, torch.ones(64), stats)


def test_channels_that_read_one_row_get_one_scale() -> None:
    weight, stats = outlier_case(width=64)
    shared = torch.arange(64) % 32
    source = Source("linear", "v", torch.randn(32, 10), shared=shared)
    before_weight, before_rows = weight.clone(), source.weight.clone()
    record = awq(LiveFeed(source, [Target("o", weight, W4)], stats), torch.bfloat16, AWQ.options)
    assert record["source"] == "v" and record["form"] in ("plain", "duo")
    ratio = (weight / before_weight)[0]
    torch.testing.assert_close(ratio[:32], ratio[32:])
    torch.testing.assert_close(source.weight * ratio[:32, None], before_rows)


def test_readers_that_stay_unquantised_are_rescaled_by_powers_of_two() -> None:
    weight, stats = outlier_case()
    router = torch.randn(4, 64).to(torch.bfloat16).float()
    kept, norm = router.clone(), torch.ones(64)
    targets = [Target("up", weight, W4), Target("router", router, None)]
    awq(LiveFeed(Source("norm", "n", norm), targets, stats), torch.bfloat16, AWQ.options)
    ratio = (router / kept)[0]
    assert bool((ratio.log2() == ratio.log2().round()).all()) and bool((ratio != 1).any())
    assert torch.equal(norm * ratio, torch.ones(64))


@pytest.mark.parametrize("targets", ["no source", "nothing quantised"])
def test_feeds_that_cannot_be_scaled_are_left_alone_and_say_so(targets: str) -> None:
    weight, stats = outlier_case()
    kept = weight.clone()
    source = None if targets == "no source" else Source("norm", "n", torch.ones(64))
    feed = LiveFeed(source, [Target("a", weight, W4 if source is None else None)], stats)
    assert awq(feed, torch.bfloat16, AWQ.options) == {"source": None, "form": "none", "alpha": 0.0}
    assert torch.equal(weight, kept)


def test_silent_channels_and_zero_weights_do_no_harm() -> None:
    weight, stats = outlier_case()
    assert stats.second_moment is not None
    stats.second_moment[3], stats.second_moment[:, 3] = 0, 0
    weight[:, 5] = 0
    weight[2] = 0
    scale, _ = search_scale([weight], [W4], stats, torch.bfloat16, AWQ.options)
    assert bool(scale.isfinite().all()) and bool((scale > 0).all())
    assert float(scale.max() / scale.min()) < 1e4


def test_rounding_after_the_fold_loses_less_than_before_it() -> None:
    """Folding rescales the statistics too, so the rounding needs no new pass over the tokens."""
    weight, stats = outlier_case()
    original, norm = weight.clone(), torch.ones(64)
    assert stats.second_moment is not None
    moment = stats.second_moment.clone()
    options = {**RTN.options, **AWQ.rounding_options}
    plain = RTN.function(original, W4, stats, torch.bfloat16, options).dequantize()
    awq(LiveFeed(Source("norm", "n", norm), [Target("a", weight, W4)], stats), torch.bfloat16, AWQ.options)
    folded = RTN.function(weight, W4, stats, torch.bfloat16, options).dequantize()
    assert output_error(folded * norm - original, moment) < output_error(plain - original, moment)


def test_before_gptq_the_scale_is_chosen_by_what_gptq_cannot_make_up_for() -> None:
    """Correlated inputs: what looks best to rounding to nearest is not what GPTQ does best with."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(96, 64, generator=generator) * 0.05
    x = torch.randn(900, 6, generator=generator) @ torch.randn(6, 64, generator=generator)
    x = x + 0.4 * torch.randn(900, 64, generator=generator)
    x[:, ::9] *= 8
    moment = x.T @ x
    losses = {}
    for compensated in (True, False, None):
        moved, norm = weight.clone(), torch.ones(64)
        stats = Stats(900, second_moment=moment)
        if compensated is not None:
            options = {**AWQ.options, "compensated": compensated, "damp": 0.01}
            awq(LiveFeed(Source("norm", "n", norm), [Target("a", moved, W4)], stats), torch.bfloat16, options)
        decoded = GPTQ.function(moved, W4, stats, torch.bfloat16, {**GPTQ.options, "damp": 0.01}).dequantize()
        losses[compensated] = output_error(decoded * norm - weight, moment)
    assert losses[True] < 0.9 * losses[False]
    assert losses[True] < 0.9 * losses[None]


def test_gptq_hints_that_it_rounds_next_and_what_is_given_wins() -> None:
    assert AWQ.settings(RTN)["compensated"] is False
    assert AWQ.settings(GPTQ)["compensated"] is True
    assert AWQ.settings(GPTQ, {"compensated": False, "grid": 10}) == {**AWQ.options, "grid": 10}


def test_missing_statistics_are_named() -> None:
    with pytest.raises(InputError, match="needs calibration statistics"):
        search_scale([torch.ones(2, 64)], [W4], Stats(), torch.bfloat16, AWQ.options)
