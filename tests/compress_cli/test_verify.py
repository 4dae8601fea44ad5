"""`compress verify`: the table, the JSON, and exit code 1 when a check fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from compress_llm.compress_cli.main import cli
from compress_llm.compress_cli.runs.quantize import quantize
from compress_llm.compress_cli.runs.recipe import Recipe


@pytest.fixture
def pair(save_model: Callable[..., Path], tmp_path: Path) -> tuple[str, str]:
    model = save_model("Llama", vocab_size=96)
    quantize(str(model), tmp_path / "out", Recipe(group_size=32))
    return str(model), str(tmp_path / "out")


def test_passes_and_prints_only_the_report_as_json(pair: tuple[str, str]) -> None:
    model, out = pair
    done = CliRunner().invoke(cli, ["verify", out, "--reference", model, "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert list(report) == ["passed", "checks"]
    assert report["passed"] is True
    assert all(item.keys() == {"name", "passed", "detail"} and item["passed"] for item in report["checks"])


def test_fails_with_exit_code_1_and_names_the_check(pair: tuple[str, str]) -> None:
    out = Path(pair[1])
    file = out / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    done = CliRunner().invoke(cli, ["verify", str(out)])
    assert done.exit_code == 1
    assert "FAILED" in done.stdout
    assert "model.safetensors has changed" in done.stdout
    assert "checks failed (files, hashes" in done.stderr
    assert json.loads(CliRunner().invoke(cli, ["verify", str(out), "--json"]).stdout)["passed"] is False


def test_what_cannot_be_verified_is_a_usage_error(pair: tuple[str, str]) -> None:
    done = CliRunner().invoke(cli, ["verify", pair[0]])
    assert done.exit_code == 2
    assert "has no compress_report.json" in done.stderr


def test_another_reference_is_not_taken_for_a_damaged_copy(pair: tuple[str, str]) -> None:
    done = CliRunner().invoke(cli, ["verify", pair[1], "--reference", pair[1]])
    assert done.exit_code == 1
    assert "name the model that it was made from as --reference" in done.stderr
