"""The doctor answers on any machine, and says what is wrong with this one."""

from __future__ import annotations

import pytest

from compress_llm.compress_cli.runs import doctor
from compress_llm.compress_cli.runs.peers import Note, notes
from compress_llm.compress_cli.runs.plain_json import to_json
from compress_llm.formats.scheme import SCHEMES
from compress_llm.kernels import registry


def installed(monkeypatch: pytest.MonkeyPatch, lines: list[str], versions: dict[str, str]) -> None:
    monkeypatch.setattr(doctor, "requires", lambda name: lines)
    monkeypatch.setattr(doctor, "_version", {doctor.DISTRIBUTION: "1", **versions}.get)


def test_every_scheme_has_a_kernel_and_reasons_against_others() -> None:
    kernels = doctor.diagnose().kernels
    assert [row.scheme for row in kernels] == list(SCHEMES)
    assert [row.packing for row in kernels] == [scheme.packing for scheme in SCHEMES.values()]
    assert all(row.picked not in row.others and row.reason and all(row.others.values()) for row in kernels)


def test_kernels_of_sparse_weights_are_told() -> None:
    (row,) = (row for row in doctor.diagnose().kernels if row.scheme == "SPARSE50")
    assert {row.picked, *row.others} == {"cuda", "triton", "scaled", "three-layer", "reference"}
    assert "no layout" not in "".join(row.others.values())


def test_a_kernel_that_is_asked_for_and_cannot_run_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESS_KERNEL", "cdua")
    diagnosis = doctor.diagnose()
    assert all("no layout" in row.reason for row in diagnosis.kernels)
    (problem,) = (text for text in diagnosis.problems if "COMPRESS_KERNEL=cdua" in text)
    assert "no kernel implementation has this name" in problem


def test_a_kernel_of_some_schemes_is_told_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESS_KERNEL", "three-layer")
    monkeypatch.setattr(registry, "_hopper_misfit", lambda problem: None)
    registry._pick.cache_clear()
    diagnosis = doctor.diagnose()
    registry._pick.cache_clear()
    assert [row.scheme for row in diagnosis.kernels if row.picked == "three-layer"] == ["SPARSE50"]
    assert "for sparse weights" in diagnosis.problems[-1]


def test_report_is_plain_and_the_machine_is_described() -> None:
    diagnosis = doctor.diagnose()
    assert to_json(diagnosis)
    assert diagnosis.machine.cores >= 1
    assert diagnosis.machine.processor
    assert diagnosis.machine.torch_threads


def test_missing_and_unfit_packages_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, ["a>=2", "b>=1,<3", "c>=1; extra == 'test'", "d>=1"], {"a": "1.5", "b": "2.0"})
    assert doctor.diagnose().problems == [
        "a 1.5 does not fit; run: python -m pip install 'a>=2'",
        "d is missing; run: python -m pip install 'd>=1'",
    ]


def test_without_torch_the_rest_is_still_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    diagnosis = doctor.diagnose()
    assert (diagnosis.kernels, diagnosis.machine.torch_threads) == ([], None)
    assert diagnosis.python


def test_notes_follow_versions() -> None:
    def about_asymmetric(version: str | None) -> bool:
        found = notes(lambda name: version if name == "transformers" else None)
        return any("W4A16_ASYM" in text for text in found)

    assert about_asymmetric("5.24.0")
    assert not about_asymmetric("5.17.0")
    assert not about_asymmetric(None)


def test_a_note_may_depend_on_the_machine() -> None:
    assert not Note("vllm", "text", unless=lambda: True).applies(lambda name: "1.0")
    assert Note("vllm", "text", unless=lambda: False).applies(lambda name: "1.0")
