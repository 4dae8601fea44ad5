"""Scale rules: against plain formulas, at the ends of every dtype, and against each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress_llm.formats.errors import InputError
from compress_llm.formats.rounded import fake_quantize, round_to_grid
from compress_llm.formats.scheme import SCHEMES, Scheme
from compress_llm.quantizers.scales import ERROR_POWER, RULES, choose, resolve, shared

W4 = SCHEMES["W4A16"].with_group(16)
W4_ASYM = SCHEMES["W4A16_ASYM"].with_group(16)
W4_FLOAT = replace(W4_ASYM, zero_dtype="float")
W8 = SCHEMES["W8A8"]
ANY_RULES = ("minmax", "mse", "local-hessian")
EVERY = (W4, W4_ASYM, W4_FLOAT, W4.with_group("channel"), W4_ASYM.with_group("channel"), W8)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def weight(rows: int = 12, width: int = 48, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator) * torch.rand(rows, 1, generator=generator).add(0.05)


def moment(width: int = 48, seed: int = 1) -> torch.Tensor:
    x = torch.randn(200, width, generator=torch.Generator().manual_seed(seed))
    return x.T @ (x * torch.linspace(0.1, 3, width))


def group_errors(w: torch.Tensor, scheme: Scheme, rule: str, dtype: torch.dtype, h: torch.Tensor | None = None):
    params = choose(w, scheme, rule, dtype, h)
    return (fake_quantize(w, scheme, params) - w).reshape(w.shape[0], params.scale.shape[1], -1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_minmax_symmetric_maps_the_largest_magnitude_to_half_the_range(dtype: torch.dtype) -> None:
    w = weight()
    expected = (w.reshape(12, 3, 16).abs().amax(-1) / 7.5).to(dtype)
    params = choose(w, W4, "minmax", dtype)
    assert torch.equal(params.scale, expected)
    assert params.zero is None


def test_minmax_asymmetric_covers_the_range_with_an_integer_zero_from_the_stored_scale() -> None:
    w = weight() + 0.05
    params = choose(w, W4_ASYM, "minmax", torch.bfloat16)
    groups = w.reshape(12, 3, 16)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    assert torch.equal(params.scale, ((high - low) / 15).to(torch.bfloat16))
    assert params.zero is not None and params.zero.dtype == torch.int8
    assert torch.equal(params.zero, (-8 - low / params.scale.float()).round().clamp(-8, 7).to(torch.int8))
    reach = params.scale.float() * 0.51 + 15 * params.scale.float() * 2**-8
    assert bool((group_errors(w, W4_ASYM, "minmax", torch.bfloat16).abs().amax(-1) <= reach).all())


@pytest.mark.parametrize("scheme", EVERY, ids=lambda s: f"{s.name}-{s.group_size}-{s.zero_dtype}")
@pytest.mark.parametrize("rule", ANY_RULES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_weights_keep_scales_positive_and_values_finite(scheme: Scheme, rule: str, dtype: torch.dtype) -> None:
    w = torch.zeros(7, 48)
    w[1] = 1e-40  # denormal
    w[2] = -torch.finfo(dtype).max
    w[3, ::2], w[3, 1::2] = torch.finfo(dtype).max, -torch.finfo(dtype).max
    w[4] = 0.3
    w[5] = -1e-7
    w[6, 5] = 1.0
    params = choose(w, scheme, rule, dtype, moment())
    assert params.scale.dtype == dtype
    assert bool((params.scale > 0).all()) and bool(params.scale.isfinite().all())
    decoded = round_to_grid(w, scheme, params).dequantize(dtype)
    assert bool(decoded.isfinite().all())
    assert bool((decoded[0] == 0).all())
    assert torch.allclose(decoded[4].float(), w[4], rtol=0.07)
    for value in (scheme.grid.lowest, scheme.grid.highest):
        ends = value * params.scale.float() if params.zero is None else value - params.zero.float()
        assert bool(ends.isfinite().all())


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    tails=st.floats(0.5, 4),
    shift=st.floats(-1, 1),
    which=st.integers(0, len(EVERY) - 1),
    dtype=st.sampled_from(DTYPES),
)
def test_mse_never_loses_more_of_a_group_than_minmax(seed: int, tails: float, shift: float, which: int, dtype) -> None:
    w = weight(seed=seed)
    w = w.sign() * w.abs() ** tails + shift * w.std()
    before = (group_errors(w, EVERY[which], "minmax", dtype).abs() ** ERROR_POWER).sum(-1)
    after = (group_errors(w, EVERY[which], "mse", dtype).abs() ** ERROR_POWER).sum(-1)
    assert bool((after <= before * (1 + 1e-5)).all())


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), which=st.sampled_from([0, 1, 2]))
def test_local_hessian_never_loses_more_of_a_groups_output_than_the_others(seed: int, which: int) -> None:
    w, h = weight(seed=seed), moment(seed=seed + 1)
    blocks = [h[i : i + 16, i : i + 16].double() for i in range(0, 48, 16)]

    def cost(rule: str) -> torch.Tensor:
        error = group_errors(w, EVERY[which], rule, torch.bfloat16, h).double()
        parts = [(error[:, g] @ block * error[:, g]).sum(-1) for g, block in enumerate(blocks)]
        return torch.stack(parts, 1)

    for rule in ("minmax", "mse"):
        assert bool((cost("local-hessian") <= cost(rule) * (1 + 1e-4)).all())


def test_local_hessian_of_whole_rows_weighs_by_the_energy_of_each_input() -> None:
    w, scheme = weight(), W4.with_group("channel")
    energy = torch.linspace(0.01, 5, 48)
    weighted = [
        float((group_errors(w, scheme, rule, torch.bfloat16, energy.diag()).square().sum(1) @ energy).sum())
        for rule in ("minmax", "mse", "local-hessian")
    ]
    assert weighted[2] < min(weighted[:2])


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    w, h = weight(rows=37), moment()
    whole = [choose(w, W4_ASYM, rule, torch.bfloat16, h) for rule in ANY_RULES]
    monkeypatch.setattr("compress_llm.quantizers.scales._CHUNK", {"cpu": 5 * 48})
    for rule, expected in zip(ANY_RULES, whole, strict=True):
        params = choose(w, W4_ASYM, rule, torch.bfloat16, h)
        assert torch.equal(params.scale, expected.scale)
        assert params.zero is not None and expected.zero is not None and torch.equal(params.zero, expected.zero)


def test_a_group_far_from_zero_still_holds_zero_in_its_range() -> None:
    w = torch.full((2, 16), 3.0)
    w[1] = -3.0
    params = choose(w, W4_ASYM, "minmax", torch.bfloat16)
    assert params.zero is not None
    assert params.zero.flatten().tolist() == [-8, 7]
    assert torch.allclose(round_to_grid(w, W4_ASYM, params).dequantize(), w, rtol=1e-2)


def test_errors_name_the_rule() -> None:
    with pytest.raises(InputError, match="did you mean 'minmax'"):
        choose(weight(), W4, "min-max", torch.bfloat16)
    with pytest.raises(InputError, match="needs calibration statistics"):
        choose(weight(), W4, "local-hessian", torch.bfloat16)
    with pytest.raises(InputError, match="--scale-rule floor: is not for the scales of NVFP4A16; use one of .*four"):
        choose(weight(), SCHEMES["NVFP4A16"], "floor", torch.bfloat16)
    with pytest.raises(InputError, match="is not for the scales of W4A16"):
        resolve("four-over-six", W4)


def test_every_rule_is_for_some_scheme_and_defaults_are_the_schemes_own() -> None:
    for rule in RULES:
        fits = []
        for scheme in SCHEMES.values():
            try:
                fits.append(resolve(rule, scheme))
            except InputError:
                continue
        assert fits, rule
    assert resolve("default", W4) == "minmax"
    assert resolve("default", SCHEMES["MXFP4"]) == "mse"
    assert resolve("max", SCHEMES["NVFP4"]) == "minmax"
    assert resolve("local-hessian", SCHEMES["FP8"]) == "minmax"  # the scale is that of fused weights too


@pytest.mark.parametrize("name", ["FP8_BLOCK", "W8A8_BLOCK"])
@pytest.mark.parametrize("rule", ["minmax", "mse"])
def test_blocks_of_rows_share_their_scale(name: str, rule: str) -> None:
    w = weight(200, 256)
    params = choose(w, SCHEMES[name], rule, torch.float32)
    assert params.scale.shape == (200, 2)
    for rows in (slice(0, 128), slice(128, 200)):
        for group in range(2):
            block = w[rows, group * 128 : group * 128 + 128]
            found = params.scale[rows, group].unique()
            assert found.numel() == 1
            if rule == "minmax":
                assert float(found) == pytest.approx(float(block.abs().max()) / SCHEMES[name].grid.reach)


def test_what_spans_a_tensor_takes_the_peak_it_is_given() -> None:
    w = weight()
    own = choose(w, SCHEMES["FP8"], "minmax", torch.float32)
    wider = choose(w, SCHEMES["FP8"], "minmax", torch.float32, peak=w.abs().max() * 2)
    assert own.scale.unique().numel() == wider.scale.unique().numel() == 1
    assert torch.equal(own.scale * 2, wider.scale)
    assert float(own.scale[0]) == pytest.approx(float(w.abs().max()) / 448)


def test_sharing_reduces_whole_blocks_and_the_rest() -> None:
    values = torch.arange(5.0).unsqueeze(1)
    assert shared(values, 2, torch.amax).flatten().tolist() == [1, 1, 3, 3, 4]
    assert shared(values, 1, torch.amax) is values
