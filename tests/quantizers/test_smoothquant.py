"""SmoothQuant: the estimate of what rounding the inputs costs, the search over it, and the fold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compress_llm.calibration.statistics import Stats
from compress_llm.formats.errors import InputError
from compress_llm.formats.rounded import fake_quantize
from compress_llm.formats.scheme import SCHEMES, Scheme
from compress_llm.kernels.hadamard import rotated
from compress_llm.quantizers.method import LiveFeed, Source, Target
from compress_llm.quantizers.scales import choose
from compress_llm.quantizers.smoothquant import SMOOTHQUANT, input_error, search_strength, smoothquant

DYNAMIC, STATIC = SCHEMES["W8A8"], SCHEMES["W8A8_STATIC"]
TURNED = replace(DYNAMIC, rotation=16)


def outlier_case(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Stats]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(500, 48, generator=generator)
    x[:, ::12] *= 60
    stats = Stats()
    stats.add(x, SMOOTHQUANT.needs)
    return torch.randn(32, 48, generator=generator) * 0.05, x, stats


def simulated(weight: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> float:
    """Mean squared output error of both roundings, by running them."""
    scaled = rotated(weight * scale, scheme)
    decoded = fake_quantize(scaled, scheme, choose(scaled, scheme, "minmax", torch.bfloat16))
    inputs = rotated(x / scale, scheme)
    top = inputs.abs().amax(-1, keepdim=True) if scheme is not STATIC else inputs.abs().amax()
    step = top / 127.5
    rounded = (inputs / step).round().clamp(-128, 127) * step
    return float((rounded @ decoded.T - x @ weight.T).square().sum(1).mean())


@pytest.mark.parametrize("scheme", [DYNAMIC, STATIC, TURNED], ids=["dynamic", "static", "rotated"])
def test_the_estimate_agrees_with_running_the_layer(scheme: Scheme) -> None:
    weight, x, stats = outlier_case()
    scale, record = search_strength([weight], [scheme], stats, torch.bfloat16, SMOOTHQUANT.options)
    for estimate, at in (("error_before", torch.ones(48)), ("error_after", scale)):
        assert record[estimate] == pytest.approx(simulated(weight, x, at, scheme), rel=0.25)


@pytest.mark.parametrize("scheme", [DYNAMIC, STATIC], ids=["dynamic", "static"])
def test_outliers_move_into_the_weights_and_the_simulated_error_falls(scheme: Scheme) -> None:
    weight, x, stats = outlier_case()
    scale, record = search_strength([weight], [scheme], stats, torch.bfloat16, SMOOTHQUANT.options)
    assert record["alpha"] is not None
    assert float(scale[::12].min()) > 4 * float(scale[1])
    assert simulated(weight, x, scale, scheme) < 0.3 * simulated(weight, x, torch.ones(48), scheme)


def test_input_error_is_what_rounding_a_row_loses() -> None:
    sample = torch.tensor([[127.5, 0.4, 0.6], [1.275, -1.275, 0.0]])
    activation = DYNAMIC.activation
    assert activation is not None
    lost = input_error(sample, activation, torch.zeros(3))
    expected = [0.5**2 + 0.005**2, 0.4**2 + 0.0, 0.4**2]
    assert lost.tolist() == pytest.approx(expected, abs=1e-4)


def test_nothing_is_gained_nothing_is_moved() -> None:
    x = torch.randint(-2, 3, (200, 16)).float() * 0.0
    stats = Stats()
    stats.add(x, SMOOTHQUANT.needs)
    weight = torch.randn(8, 16)
    kept, norm = weight.clone(), torch.ones(16)
    feed = LiveFeed(Source("norm", "n", norm), [Target("a", weight, DYNAMIC)], stats)
    assert smoothquant(feed, torch.bfloat16, SMOOTHQUANT.options)["alpha"] is None
    assert torch.equal(weight, kept) and torch.equal(norm, torch.ones(16))


def test_the_fold_keeps_the_function_and_rescales_what_was_seen() -> None:
    weight, x, stats = outlier_case()
    kept, norm = weight.clone(), torch.ones(48)
    feed = LiveFeed(Source("norm", "n", norm), [Target("a", weight, DYNAMIC)], stats)
    record = smoothquant(feed, torch.bfloat16, SMOOTHQUANT.options)
    assert record["source"] == "n"
    torch.testing.assert_close((x * norm) @ weight.T, x @ kept.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(stats.abs_max, (x * norm).abs().amax(0), rtol=1e-5, atol=1e-5)


def test_shared_rows_take_the_largest_of_their_channels() -> None:
    weight, _, stats = outlier_case()
    shared = torch.arange(48) % 24
    source = Source("linear", "v", torch.randn(24, 5), shared=shared)
    before = weight.clone()
    smoothquant(LiveFeed(source, [Target("o", weight, DYNAMIC)], stats), torch.bfloat16, SMOOTHQUANT.options)
    ratio = (weight / before).median(0).values
    torch.testing.assert_close(ratio[:24], ratio[24:], rtol=1e-5, atol=1e-5)


def test_weight_only_schemes_are_refused_and_missing_statistics_named() -> None:
    assert SMOOTHQUANT.misfit(SCHEMES["W4A16"]) == "its inputs are not quantised"
    assert SMOOTHQUANT.misfit(DYNAMIC) is None
    with pytest.raises(InputError, match="needs calibration statistics"):
        search_strength([torch.ones(2, 4)], [DYNAMIC], Stats(), torch.bfloat16, SMOOTHQUANT.options)
