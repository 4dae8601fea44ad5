"""GPTQ: against a column-by-column float64 transcription of the published update, and what must hold of any solver."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import pytest
import torch

from compress_llm.calibration import factor
from compress_llm.calibration.factor import factorize
from compress_llm.calibration.statistics import Stats, output_error
from compress_llm.formats.errors import InputError
from compress_llm.formats.rounded import QParams, Rounded, round_to_grid
from compress_llm.formats.scheme import SCHEMES, Scheme
from compress_llm.quantizers.gptq import GPTQ, round_gptq, round_pruned, solve
from compress_llm.quantizers.scales import choose

W4 = SCHEMES["W4A16"].with_group(16)
SCHEMES_TRIED = (
    W4,
    W4.with_group("channel"),
    SCHEMES["W4A16_ASYM"].with_group(16),
    replace(SCHEMES["W4A16_ASYM"].with_group(16), zero_dtype="float"),
    SCHEMES["W8A8"],
    SCHEMES["NVFP4A16"],
    SCHEMES["MXFP4A16"],
)


def case(out: int = 24, width: int = 64, tokens: int = 512, seed: int = 0) -> tuple[torch.Tensor, Stats]:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(width) + 0.2 * torch.randn(width, width, generator=generator)
    x = torch.randn(tokens, width, generator=generator) @ mix * torch.linspace(0.3, 2, width)
    stats = Stats()
    stats.add(x, ["second_moment"])
    return torch.randn(out, width, generator=generator) * 0.05, stats


def published(
    weight: torch.Tensor, scheme: Scheme, params: QParams, hessian: torch.Tensor, damp: float, act_order: bool
) -> torch.Tensor:
    """Algorithm 1 of the paper without its batching: one column at a time, everything in float64."""
    w, h = weight.double().clone(), hessian.double().clone()
    h += damp * h.diagonal().mean() * torch.eye(len(h))
    order = h.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(len(h))
    w, h = w[:, order], h[order][:, order]
    upper = torch.linalg.cholesky(torch.linalg.inv(h)).mH
    scale, zero = params.spread(weight.shape[1])
    values = torch.zeros(weight.shape, dtype=torch.float64)
    for j, column in enumerate(order.tolist()):
        s = scale[:, column].double()
        z = torch.zeros_like(s) if zero is None else zero[:, column].double()
        values[:, column] = (on_grid(w[:, j] / s + z, scheme) - z) * s
        w[:, j:] -= torch.outer((w[:, j] - values[:, column]) / upper[j, j], upper[j, j:])
    return values


def on_grid(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The nearest numbers that the scheme has codes for, by other means than its grid's."""
    x = x.clamp(scheme.grid.lowest, scheme.grid.highest)
    if scheme.grid.name != "e2m1":
        return x.round()
    return torch.from_numpy(x.numpy().astype(ml_dtypes.float4_e2m1fn).astype("float64"))


@pytest.mark.parametrize("scheme", SCHEMES_TRIED, ids=lambda s: f"{s.name}-{s.group_size}-{s.zero_dtype}")
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("block", [128, 24, 1])
def test_codes_equal_the_published_update(scheme: Scheme, act_order: bool, block: int) -> None:
    w, stats = case(out=24 if scheme.grid.bits == 4 else 6, seed=2)  # finer steps meet ties that float32 decides
    assert stats.second_moment is not None
    params = choose(w, scheme, "mse", torch.bfloat16)
    mine = solve(w, scheme, params, factorize(stats.second_moment, 0.01, act_order), block)
    values = Rounded(scheme, mine, params).dequantize()
    assert torch.allclose(
        values.double(), published(w, scheme, params, stats.second_moment, 0.01, act_order), rtol=1e-6
    )


@pytest.mark.parametrize("scheme", SCHEMES_TRIED, ids=lambda s: f"{s.name}-{s.group_size}-{s.zero_dtype}")
def test_output_error_is_well_below_rounding_to_nearest(scheme: Scheme) -> None:
    w, stats = case(width=96, seed=3)
    assert stats.second_moment is not None
    rounded = round_gptq(w, scheme, stats, torch.bfloat16, GPTQ.options)
    nearest = round_to_grid(w, scheme, rounded.params)
    lost, before = (output_error(w - r.dequantize(), stats.second_moment) for r in (rounded, nearest))
    assert lost < 0.8 * before
    assert rounded.codes.dtype == torch.int8
    assert rounded.codes.shape == w.shape


def test_weight_and_statistics_are_left_alone() -> None:
    w, stats = case()
    assert stats.second_moment is not None
    kept = w.clone(), stats.second_moment.clone()
    round_gptq(w, W4, stats, torch.bfloat16, GPTQ.options)
    assert torch.equal(w, kept[0])
    assert torch.equal(stats.second_moment, kept[1])


def test_inputs_that_never_fired_are_rounded_to_nearest_and_disturb_nothing() -> None:
    w, stats = case()
    assert stats.second_moment is not None
    dead = [0, 17, 63]
    stats.second_moment[dead, :] = 0
    stats.second_moment[:, dead] = 0
    rounded = round_gptq(w, W4.with_group("channel"), stats, torch.bfloat16, GPTQ.options)
    nearest = round_to_grid(w, rounded.scheme, rounded.params)
    assert torch.equal(rounded.codes[:, dead], nearest.codes[:, dead])
    lost = output_error(w - rounded.dequantize(), stats.second_moment)
    assert lost < 0.8 * output_error(w - nearest.dequantize(), stats.second_moment)


def test_a_layer_that_saw_only_zeros_is_rounded_to_nearest() -> None:
    w, _ = case()
    rounded = round_gptq(w, W4, Stats(5, second_moment=torch.zeros(64, 64)), torch.bfloat16, GPTQ.options)
    assert torch.equal(rounded.codes, round_to_grid(w, W4, rounded.params).codes)


def test_fewer_tokens_than_inputs_still_solve() -> None:
    w, _ = case()
    stats = Stats()
    stats.add(torch.randn(5, 64, generator=torch.Generator().manual_seed(1)), ["second_moment"])
    rounded = round_gptq(w, W4, stats, torch.bfloat16, GPTQ.options)
    assert bool(rounded.dequantize().isfinite().all())


def test_missing_statistics_are_named() -> None:
    with pytest.raises(InputError, match="needs calibration statistics"):
        round_gptq(torch.ones(2, 16), W4, None, torch.bfloat16, GPTQ.options)


def test_linears_with_one_input_share_the_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    w, stats = case()
    calls: list[int] = []
    real = factor.factorize
    monkeypatch.setattr(factor, "factorize", lambda *args: calls.append(1) or real(*args))
    first = round_gptq(w, W4, stats, torch.bfloat16, GPTQ.options)
    again = round_gptq(w, W4, stats, torch.bfloat16, GPTQ.options)
    assert len(calls) == 1
    assert torch.equal(first.codes, again.codes)
    stats.add(torch.randn(600, 64), ["second_moment"])
    round_gptq(w, W4, stats, torch.bfloat16, GPTQ.options)
    assert len(calls) == 2


def test_dropped_weights_get_code_zero_and_are_made_up_for() -> None:
    w, stats = case(width=96, seed=4)
    assert stats.second_moment is not None
    keep = torch.rand(w.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    pruned = w * keep
    found = round_pruned(w, pruned, W4, stats, torch.bfloat16, GPTQ.options)
    assert not found.codes[~keep].any()
    nearest = round_to_grid(pruned, W4, found.params)
    lost, before = (output_error(w - r.dequantize(), stats.second_moment) for r in (found, nearest))
    assert lost < 0.8 * before


def test_a_mask_that_keeps_everything_changes_nothing() -> None:
    w, stats = case(seed=5)
    free = round_gptq(w, W4, stats, torch.bfloat16, GPTQ.options)
    assert torch.equal(round_pruned(w, w, W4, stats, torch.bfloat16, GPTQ.options).codes, free.codes)
