"""HQQ: never worse than its start in its own objective, under each kind of zero point, and what the steps do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress_llm.formats.rounded import round_to_grid
from compress_llm.formats.scheme import SCHEMES, Scheme
from compress_llm.quantizers.hqq import HQQ, lp_cost, refine, round_hqq
from compress_llm.quantizers.scales import choose, peak_of, storage

ASYM = SCHEMES["W4A16_ASYM"].with_group(16)
FLOAT = replace(ASYM, zero_dtype="float")
NVFP4, MXFP4 = SCHEMES["NVFP4A16"], SCHEMES["MXFP4A16"]
EVERY = (SCHEMES["W4A16"].with_group(16), ASYM, FLOAT, SCHEMES["W8A16"], NVFP4, MXFP4)


def weight(rows: int = 20, width: int = 64, seed: int = 0, shift: float = 0.3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, width, generator=generator)
    return (w.sign() * w.abs() ** 1.5 + shift) * 0.02


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    shift=st.floats(-2, 2),
    which=st.integers(0, len(EVERY) - 1),
    rule=st.sampled_from(["minmax", "mse"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    norm=st.sampled_from([2.0, 0.7]),
    beta=st.sampled_from([1.0, 10.0]),
)
def test_never_worse_than_the_start_in_any_group(
    seed: int, shift: float, which: int, rule: str, dtype, norm: float, beta: float
) -> None:
    w, scheme = weight(seed=seed, shift=shift), EVERY[which]
    rows = w.reshape(w.shape[0], scheme.groups(w.shape[1]), -1)
    start = choose(w, scheme, rule, dtype)
    before = lp_cost(rows, scheme, start, norm)
    scales = storage(scheme, rule, dtype, peak_of(w, None))
    found = refine(rows, scheme, start, scales, {**HQQ.options, "norm": norm, "beta": beta})
    assert bool((lp_cost(rows, scheme, found, norm) <= before * (1 + 1e-5)).all())
    assert found.scale.dtype == start.scale.dtype and bool((found.step > 0).all())


def test_integer_zeros_stay_integers_and_float_zeros_go_between() -> None:
    w = weight()
    integer = round_hqq(w, ASYM, None, torch.bfloat16, HQQ.options)
    assert integer.params.zero is not None and integer.params.zero.dtype == torch.int8
    assert int(integer.params.zero.min()) >= -8 and int(integer.params.zero.max()) <= 7
    real = round_hqq(w, FLOAT, None, torch.bfloat16, HQQ.options)
    assert real.params.zero is not None and real.params.zero.dtype == torch.bfloat16
    assert bool((real.params.zero.frac() != 0).any())

    def lost(codes) -> float:
        return float((codes.dequantize() - w).square().sum())

    assert lost(real) < lost(integer) < lost(round_to_grid(w, ASYM, choose(w, ASYM, "minmax", torch.bfloat16)))


@pytest.mark.parametrize("scheme", EVERY, ids=lambda s: f"{s.name}-{s.zero_dtype}")
def test_a_weight_on_the_grid_is_kept_exactly(scheme: Scheme) -> None:
    """Values that some scale and zero reproduce must come back; minmax finds them, so refining may not lose them."""
    codes = torch.arange(64).remainder(16).sub(8).repeat(6, 1).float()
    w = codes * 0.5 if scheme.grid.bits == 4 and not scheme.symmetric else codes * 0.0
    found = round_hqq(w, scheme, None, torch.float32, HQQ.options)
    assert torch.equal(found.dequantize(), w)


def test_whole_rows_and_rows_of_zeros() -> None:
    w = weight()
    w[3] = 0
    found = round_hqq(w, FLOAT.with_group("channel"), None, torch.bfloat16, HQQ.options)
    assert found.params.scale.shape == (20, 1)
    assert bool(found.dequantize().isfinite().all())
    assert float(found.dequantize()[3].abs().max()) == 0


def test_the_weight_is_left_alone_and_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    w = weight()
    kept = w.clone()
    whole = round_hqq(w, ASYM, None, torch.bfloat16, HQQ.options)
    monkeypatch.setattr("compress_llm.quantizers.scales._CHUNK", {"cpu": 64 * 3})
    parts = round_hqq(w, ASYM, None, torch.bfloat16, HQQ.options)
    assert torch.equal(w, kept)
    assert torch.equal(whole.codes, parts.codes)
    assert torch.equal(whole.params.scale, parts.params.scale)
