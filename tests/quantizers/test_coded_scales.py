"""Scales that are codes: the rules of other tools bit for bit, searches against trying every code, hard blocks."""

from __future__ import annotations

import math

import pytest
import torch
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from hypothesis import given, settings
from hypothesis import strategies as st

from compress_llm.formats.float_grids import E4M3
from compress_llm.formats.rounded import QParams, nearest, round_to_grid
from compress_llm.formats.scheme import SCHEMES, Scheme
from compress_llm.quantizers.coded_scales import GlobalScales
from compress_llm.quantizers.scales import choose, search, value_range

NVFP4, MXFP4, MXFP8 = SCHEMES["NVFP4A16"], SCHEMES["MXFP4A16"], SCHEMES["MXFP8A16"]


def weight(rows: int = 8, width: int = 128, seed: int = 0, tails: float = 1.5) -> torch.Tensor:
    w = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    return (w.sign() * w.abs() ** tails * 0.03).bfloat16().float()


def losses(w: torch.Tensor, scheme: Scheme, params: QParams) -> torch.Tensor:
    grouped = w.reshape(w.shape[0], params.groups, -1)
    return (nearest(grouped, scheme, params) - grouped).double().square().sum(-1)


@pytest.mark.parametrize("scheme", [MXFP4, MXFP8], ids=lambda scheme: scheme.name)
def test_minmax_powers_are_those_of_compressed_tensors(scheme: Scheme) -> None:
    w = weight(tails=2.5).bfloat16()
    w[0, :32] = 0
    w[1, :2] = torch.tensor([1.75, 1.7421875])
    groups = w.reshape(8, -1, 32)
    args = preset_name_to_scheme(scheme.name, ["Linear"]).weights
    expected, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    for rule in ("minmax", "even"):
        assert torch.equal(choose(w.float(), scheme, rule, torch.bfloat16).step, expected.float())


@pytest.mark.parametrize(("scheme", "emax"), [(MXFP4, 2), (MXFP8, 8)], ids=["e2m1", "e4m3"])
def test_exponents_of_floor_and_ceil(scheme: Scheme, emax: int) -> None:
    peaks = [1.0, 1.5, 1.51, 1.74, 1.75, 1.76, 1.99, 3.5e-3, 100.0]
    w = torch.zeros(len(peaks), 32)
    w[:, 5] = torch.tensor(peaks)
    floor = [2.0 ** (math.floor(math.log2(peak)) - emax) for peak in w[:, 5].tolist()]
    ceil = [2.0 ** math.ceil(math.log2(peak / scheme.grid.highest)) for peak in w[:, 5].tolist()]
    assert choose(w, scheme, "floor", torch.bfloat16).step.flatten().tolist() == floor
    assert choose(w, scheme, "ceil", torch.bfloat16).step.flatten().tolist() == ceil


def test_max_scales_are_those_of_compressed_tensors() -> None:
    w = weight().bfloat16()
    args = preset_name_to_scheme("NVFP4A16", ["Linear"]).weights
    whole = generate_gparam(w.amin(), w.amax())
    groups = w.reshape(8, -1, 16)
    expected, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=whole)
    found = choose(w.float(), NVFP4, "max", torch.bfloat16)
    assert found.global_scale is not None and torch.equal(found.global_scale, whole.float())
    assert torch.equal(E4M3.decode(found.scale), expected.float())


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), tails=st.floats(0.3, 5), outlier=st.sampled_from([0.0, 0.2, 5.0]))
def test_under_one_global_scale_each_rule_loses_no_more_than_the_simpler_one(seed, tails, outlier) -> None:
    w = weight(seed=seed, tails=tails)
    w[:, ::16] += outlier
    grouped = w.reshape(8, -1, 16)
    low, high = value_range(grouped)
    base = GlobalScales.of(NVFP4, "mse", torch.bfloat16, w.abs().max())
    lost = {"max": losses(w, NVFP4, base.first(low, high))}
    for rule in ("four-over-six", "mse"):
        scales = GlobalScales(NVFP4, rule, torch.bfloat16, base.global_scale)
        found = search(grouped, NVFP4, scales, low, high, lambda error: error.square().sum(-1))
        lost[rule] = losses(w, NVFP4, found)
    slack = 1 + 1e-5
    assert bool((lost["four-over-six"] <= lost["max"] * slack).all())
    assert bool((lost["mse"] <= lost["four-over-six"] * slack).all())


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10_000), tails=st.floats(0.3, 5))
def test_the_sweep_finds_what_trying_every_positive_code_finds(seed, tails) -> None:
    w = weight(2, 64, seed, tails)
    found = choose(w, NVFP4, "mse", torch.bfloat16)
    assert found.global_scale is not None
    every = []
    for code in range(1, E4M3.top + 1):
        scale = torch.full_like(found.scale, code)
        every.append(losses(w, NVFP4, QParams(scale, grid=E4M3, global_scale=found.global_scale)))
    best = torch.stack(every).amin(0)
    normal = w.reshape(2, -1, 16).abs().amax(-1) / 6 * found.global_scale > 2**-5
    assert bool((losses(w, NVFP4, found) <= best * (1 + 1e-5) + 1e-12)[normal].all())


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10_000), tails=st.floats(0.3, 5), scheme=st.sampled_from([MXFP4, MXFP8]))
def test_searched_powers_lose_no_more_than_any_rule(seed, tails, scheme) -> None:
    w = weight(seed=seed, tails=tails)
    best = losses(w, scheme, choose(w, scheme, "mse", torch.bfloat16))
    for rule in ("floor", "even", "ceil"):
        assert bool((best <= losses(w, scheme, choose(w, scheme, rule, torch.bfloat16)) * (1 + 1e-5)).all())


COMMON = ("minmax", "mse", "local-hessian")
CASES = [("NVFP4A16", rule) for rule in (*COMMON, "four-over-six")]
CASES += [(name, rule) for name in ("MXFP4A16", "MXFP8A16") for rule in (*COMMON, "floor", "ceil")]


@pytest.mark.parametrize(("name", "rule"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_blocks_of_zeros_of_one_outlier_and_at_the_ends_of_the_dtype(name, rule, dtype) -> None:
    scheme = SCHEMES[name]
    limit = torch.finfo(dtype).max
    w = torch.zeros(6, 64)
    w[1, 7] = 1.0
    w[2] = 1e-40
    w[3] = 0.75
    w[4, :32] = torch.linspace(-1, 1, 32)
    moment = torch.eye(64) + 0.1
    for top in (1.0, limit):
        w[5] = top
        params = choose(w, scheme, rule, dtype, moment)
        decoded = round_to_grid(w, scheme, params).dequantize(dtype)
        assert bool(decoded.isfinite().all()) and bool((params.step > 0).all())
        assert bool((decoded[0] == 0).all())
        assert torch.allclose(decoded[5].float(), w[5], rtol=0.34)
        if top == 1.0:
            assert float(decoded[1, 7]) == pytest.approx(1.0, rel=0.34)
            assert int((decoded[1] != 0).sum()) == 1


def test_a_weight_of_zeros_has_scales() -> None:
    for scheme in (NVFP4, MXFP4):
        params = choose(torch.zeros(4, 64), scheme, "default", torch.bfloat16)
        assert bool(params.step.isfinite().all()) and bool((params.step > 0).all())
        assert not bool(round_to_grid(torch.zeros(4, 64), scheme, params).dequantize().any())


def test_the_global_scale_is_that_of_all_weights_it_is_shared_by() -> None:
    w = weight()
    found = [choose(w, NVFP4, "mse", torch.bfloat16, peak=w.abs().max() * factor) for factor in (1.0, 4.0)]
    assert found[0].global_scale is not None and found[1].global_scale is not None
    assert float(found[0].global_scale / found[1].global_scale) == pytest.approx(4.0)
    assert torch.allclose(found[0].step, found[1].step, rtol=0.13)


def test_rows_are_scaled_in_chunks_without_a_difference(monkeypatch) -> None:
    w, moment = weight(37), torch.eye(128) + 0.2
    for scheme in (NVFP4, MXFP4):
        for rule in ("mse", "local-hessian"):
            whole = choose(w, scheme, rule, torch.bfloat16, moment)
            with monkeypatch.context() as patch:
                patch.setattr("compress_llm.quantizers.scales._CHUNK", {"cpu": 5 * 128})
                assert torch.equal(choose(w, scheme, rule, torch.bfloat16, moment).scale, whole.scale)
