"""`compress bench` as a command: a table for people, a report for machines, 1 when a product is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from compress_llm.compress_cli.main import cli
from compress_llm.compress_cli.runs import bench as runs
from compress_llm.compress_cli.runs import bench_kernels
from compress_llm.compress_cli.runs.quantize import quantize
from compress_llm.compress_cli.runs.recipe import Recipe
from compress_llm.compress_cli.runs.timing import Limits
from compress_llm.compress_cli.runs.tune import Tuned

SMALL = ["bench", "--device", "cpu", "--shape", "40x64", "--group-size", "32", "--tokens", "1", "--quiet"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "limits", lambda device: Limits(1e10, 1e11))


def test_table_and_json() -> None:
    done = CliRunner().invoke(cli, SMALL)
    assert done.exit_code == 0, done.stderr
    assert "40x64" in done.stdout and "reference" in done.stdout
    report = json.loads(CliRunner().invoke(cli, [*SMALL, "--json"]).stdout)
    assert report["kernels"][0]["floor_us"] > 0
    assert report["decoding"] is None


def test_wrong_results_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench_kernels.product
    monkeypatch.setattr(bench_kernels, "product", lambda *given, **more: right(*given, **more) * 2)
    done = CliRunner().invoke(cli, SMALL)
    assert done.exit_code == 1
    assert "WRONG" in done.stdout
    assert "wrong results for W4A16 40x64, 1 tokens" in done.stderr


def test_a_directory_with_its_original(tiny_llama: Path, tmp_path: Path) -> None:
    quantize(str(tiny_llama), tmp_path / "out", Recipe(group_size=32))
    given = ["bench", str(tmp_path / "out"), "--reference", str(tiny_llama), "--tokens", "1", "--device", "cpu"]
    done = CliRunner().invoke(cli, given)
    assert done.exit_code == 0, done.stderr
    assert "times as fast as the original" in done.stdout


def test_what_the_search_found_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Tuned("w4g32 40x64 1", 10.0, 8.0, 30, 2, 1, {"decode": {}})
    monkeypatch.setattr(runs, "tune", lambda *given: [row])
    done = CliRunner().invoke(cli, [*SMALL, "--tune"])
    assert "w4g32 40x64 1: 10.0 → 8.0 µs, 30 configurations, 2 of them wrong" in done.stdout


@pytest.mark.parametrize("flags", [["--group-size", "many"], ["--tune"], ["--reference", "embedded"]])
def test_mistakes_are_named(flags: list[str]) -> None:
    done = CliRunner().invoke(cli, ["bench", "--device", "cpu", "--shape", "40x64", *flags])
    assert done.exit_code == 2, done.output
