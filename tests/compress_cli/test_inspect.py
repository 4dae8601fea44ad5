"""`compress inspect`: one row a matrix, the totals, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from click.testing import CliRunner

from compress_llm.compress_cli.main import cli
from compress_llm.compress_cli.runs.quantize import quantize
from compress_llm.compress_cli.runs.recipe import Recipe


def test_table_and_json(save_model: Callable[..., Path], tmp_path: Path) -> None:
    model = save_model("Llama", vocab_size=96)
    quantize(str(model), tmp_path / "out", Recipe(group_size=32))
    done = CliRunner().invoke(cli, ["inspect", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    row = next(line for line in done.stdout.splitlines() if "model.layers.1.mlp.up_proj" in line)
    assert row.split()[:4] == ["model.layers.1.mlp.up_proj", "W4A16", "32", "96×64"]
    assert "14 packed linears" in done.stdout
    report = json.loads(CliRunner().invoke(cli, ["inspect", str(tmp_path / "out"), "--json"]).stdout)
    assert report["totals"]["packed_layers"] == 14
    plain = CliRunner().invoke(cli, ["inspect", str(model)])
    assert "llama, not quantised" in plain.stdout
    assert "16.000 bits per weight over the whole model" in plain.stdout


def test_no_directory_is_a_usage_error(tmp_path: Path) -> None:
    assert CliRunner().invoke(cli, ["inspect", str(tmp_path / "none")]).exit_code == 2
