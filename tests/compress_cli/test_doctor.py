"""`compress doctor` as a command: a page for people, a report for machines, 1 when something is missing."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from compress_llm.compress_cli.main import cli
from compress_llm.compress_cli.runs import doctor


def test_page_names_versions_and_kernels() -> None:
    done = CliRunner().invoke(cli, ["doctor"])
    assert done.exit_code == 0, done.stderr
    assert "pack-quantized" in done.stdout
    assert "compressed-tensors" in done.stdout


def test_a_kernel_asked_for_is_reported_or_refused() -> None:
    done = CliRunner().invoke(cli, ["doctor", "--kernel", "reference", "--json"])
    assert done.exit_code == 0, done.stderr
    assert {row["picked"] for row in json.loads(done.stdout)["kernels"]} == {"reference"}
    wrong = CliRunner().invoke(cli, ["doctor", "--kernel", "fast"])
    assert wrong.exit_code == 2
    assert wrong.stderr.startswith("Error: kernel 'fast': no kernel implementation has this name; use one of cuda")


def test_json_and_the_exit_code_of_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "requires", lambda name: ["no-such-package>=7"])
    monkeypatch.setattr(doctor, "_version", {doctor.DISTRIBUTION: "1"}.get)
    done = CliRunner().invoke(cli, ["doctor", "--json"])
    assert done.exit_code == 1
    assert "no-such-package" in json.loads(done.stdout)["problems"][0]
    assert done.stderr == "Error: this machine: problems found: 1; do what each of them says.\n"
