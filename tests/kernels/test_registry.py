"""The first implementation that can is picked, and every other one has a reason; what is asked for runs or fails."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compress_llm.formats.errors import InputError
from compress_llm.kernels import registry
from compress_llm.kernels.cuda import nvrtc
from compress_llm.kernels.registry import Problem, pick, prefer


def problem(device="cuda", capability=(9, 0), dtype=torch.bfloat16, columns=4096, narrow=False) -> Problem:
    return Problem(device, capability, 1, 4096, columns, dtype, 8 if narrow else 4, 0 if narrow else 128, narrow)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(registry.VARIABLE, raising=False)
    monkeypatch.setattr(nvrtc, "library", lambda: object())
    registry._pick.cache_clear()


def test_preference_and_reasons() -> None:
    assert pick(problem()).name == "cuda"
    assert pick(problem()).others["triton"] == "cuda is preferred"
    ampere = pick(problem(capability=(8, 0)))
    assert (ampere.name, ampere.others["cuda"]) == ("triton", "written for compute capability 9.0 (H100, H200)")
    assert pick(problem(capability=(7, 5))).name == "reference"
    assert pick(problem(columns=4100)).name == "triton"
    assert pick(problem(columns=4104)).name == "cuda"
    assert pick(problem(columns=4104, narrow=True)).name == "triton"
    assert "float32" in pick(problem(dtype=torch.float32)).others["triton"]


def test_what_is_preferred_runs_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.VARIABLE, "reference")
    with prefer("triton"):
        assert (pick(problem()).name, pick(problem(), "cuda").name) == ("triton", "cuda")
        with pytest.raises(InputError, match="kernel 'triton': it cannot run here"):
            pick(problem(device="cpu"))
    with prefer(None):
        assert pick(problem()).name == "reference"
    with pytest.raises(InputError, match="use one of cuda, triton"), prefer("fast"):
        pass


def test_8_bit_floating_point_numbers_need_a_gpu_that_multiplies_them() -> None:
    for capability, name in (((8, 0), "reference"), ((8, 9), "triton"), ((9, 0), "cuda"), ((10, 0), "triton")):
        assert pick(replace(problem(capability=capability, narrow=True), floating=True)).name == name
        assert pick(problem(capability=capability, narrow=True)).name in ("triton", "cuda")


def test_4_bit_weights_are_multiplied_with_8_bit_inputs_by_one_kernel() -> None:
    given = replace(problem(narrow=True), bits=4, group=128)
    assert pick(given).name == "cuda"
    assert pick(given).others["triton"] == "multiplies 4-bit weights as 16-bit numbers"
    assert pick(replace(given, capability=(8, 9))).name == "reference"


def test_microscaled_products_run_where_they_are_asked_for() -> None:
    given = replace(problem(capability=(10, 0)), floating=True, microscaled=True)
    assert (pick(given).name, pick(given, "scaled").name) == ("triton", "scaled")
    assert pick(problem(capability=(10, 0))).others["scaled"] == "for microscaled weights and activations"
    with pytest.raises(InputError, match="needs compute capability 10.0"):
        pick(replace(given, capability=(9, 0)), "scaled")


def test_three_layers_run_where_they_are_asked_for() -> None:
    given = replace(problem(), sparse="any")
    assert (pick(given).name, pick(given, "three-layer").name) == ("cuda", "three-layer")
    assert pick(given).others["three-layer"] == "cuda is preferred"
    assert pick(problem()).others["three-layer"] == "for sparse weights"
    for unfit in (problem(), replace(given, capability=(8, 0)), replace(given, sparse="bitmap")):
        with pytest.raises(InputError, match="kernel 'three-layer': it cannot run here"):
            pick(unfit, "three-layer")
    for unfit in ({"in_features": 4100}, {"capability": (8, 0)}, {"dtype": torch.float32}):
        assert pick(replace(given, **unfit)).name in ("triton", "reference")


def test_a_weight_in_three_layers_has_no_other_kernel() -> None:
    given = replace(problem(), sparse="three-layer")
    assert pick(given).name == "three-layer"
    assert pick(replace(given, device="cpu")).name == "reference"
    for name in ("cuda", "triton"):
        with pytest.raises(InputError, match="in the layout of three-layer"):
            pick(given, name)


def test_without_a_compiler_triton_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "library", lambda: None)
    assert pick(problem()).others["cuda"] == "libnvrtc is not installed"
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    registry._pick.cache_clear()
    assert pick(problem()).others["triton"] == "triton is not installed"


def test_on_a_cpu_the_reference_runs() -> None:
    chosen = pick(problem("cpu", (0, 0)))
    assert chosen.name == "reference"
    assert all(chosen.others.values())


def test_what_is_asked_for_runs_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick(problem(), "triton").reason == "asked for"
    monkeypatch.setenv(registry.VARIABLE, "reference")
    assert pick(problem()).name == "reference"
    assert pick(problem(), "cuda").name == "cuda"
    with pytest.raises(InputError, match="kernel 'cuda': it cannot run here"):
        pick(problem("cpu", (0, 0)), "cuda")
    monkeypatch.setenv(registry.VARIABLE, "tritn")
    with pytest.raises(InputError, match="COMPRESS_KERNEL=tritn.*triton"):
        pick(problem())


def test_what_no_cpu_runs_is_refused_before_a_weight_is_loaded(monkeypatch):
    for name, device, cause in (("tritn", "cuda", "triton"), ("three-layer", "cpu", "on a cpu")):
        monkeypatch.setenv(registry.VARIABLE, name)
        with pytest.raises(InputError, match=f"COMPRESS_KERNEL={name}.*{cause}"):
            registry.check_asked(device)
    for name, device in (("three-layer", "cuda"), ("reference", "cpu"), ("", "cpu")):
        monkeypatch.setenv(registry.VARIABLE, name)
        registry.check_asked(device)
