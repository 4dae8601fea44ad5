"""`compress eval-ppl`: the table, the JSON alone on stdout, and the exit codes of the gate."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from compress_llm.compress_cli.main import cli
from compress_llm.compress_cli.runs.quantize import quantize
from compress_llm.compress_cli.runs.recipe import Recipe


@pytest.fixture(scope="module")
def pair(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    model = save_model("Llama", num_hidden_layers=1, initializer_range=0.2)
    out = tmp_path_factory.mktemp("packed") / "out"
    quantize(str(model), out, Recipe(group_size=32))
    return str(model), str(out)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("It was the best of times, it was the worst of times. " * 20)
    return str(file)


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, ["eval-ppl", *args])


def test_json_is_alone_on_stdout_with_every_key(pair: tuple[str, str], text: str) -> None:
    done = run(pair[1], "--reference", pair[0], "--dataset", text, "--window", "32", "--limit", "3", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["windows"] == 3
    assert report["tokens_scored"] == 93
    assert report["kl"] > 0
    assert 0 <= report["top1_agreement"] <= 1
    assert report["reference"]["perplexity"] > 1
    assert report["protocol"]["name"] == "plain"
    assert report["check"] == {"passed": None, "reason": None}


def test_the_table_shows_figure_protocol_and_distance(pair: tuple[str, str], text: str) -> None:
    done = run(pair[1], "--reference", pair[0], "--dataset", text, "--window", "32", "--bos", "once")
    assert done.exit_code == 0, done.output
    for shown in ("perplexity", "plain: window 32, stride 32, BOS once", "KL to it", "equal first choices", "text.txt"):
        assert shown in done.stdout


def test_snake_case_flags_are_taken(pair: tuple[str, str], text: str, tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    done = run(pair[0], "--dataset", text, "--window", "32", "--limit", "2", "--write_baseline", str(file))
    assert done.exit_code == 0, done.output
    assert json.loads(file.read_text())["subject"]["windows"] == 2


def test_a_regression_exits_with_1_and_prints_the_result(pair: tuple[str, str], text: str, tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    flags = ["--dataset", text, "--window", "32"]
    run(pair[0], "--reference", pair[0], *flags, "--write-baseline", str(file))
    done = run(pair[1], "--reference", pair[0], *flags, "--check", str(file), "--json")
    assert done.exit_code == 1, done.output
    report = json.loads(done.stdout)
    assert report["check"]["passed"] is False
    assert "KL WORSE" in report["check"]["reason"]
    assert "KL WORSE" in done.stderr
    better = run(pair[0], "--reference", pair[0], *flags, "--check", str(file))
    assert better.exit_code == 0, better.output
    assert "KL unchanged" in better.stdout


def test_another_protocol_exits_with_2(pair: tuple[str, str], text: str, tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    run(pair[0], "--dataset", text, "--window", "32", "--write-baseline", str(file))
    done = run(pair[0], "--dataset", text, "--window", "16", "--check", str(file), "--json")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "window is 16 here and 32 there" in done.stderr


@pytest.mark.parametrize("flags", [["--protocol", "plane"], ["--bos", "twice"], ["--window", "many"], ["--limit", "0"]])
def test_usage_errors_exit_with_2(pair: tuple[str, str], text: str, flags: list[str]) -> None:
    done = run(pair[0], "--dataset", text, *flags)
    assert done.exit_code == 2
    assert done.stdout == ""


@pytest.mark.parametrize("fill", [0x00, 0xFF])
def test_a_damaged_bitmap_exits_with_2_and_no_figure(
    pair: tuple[str, str], text: str, tmp_path: Path, fill: int
) -> None:
    quantize(pair[0], tmp_path / "out", Recipe(scheme="SPARSE50_W4A16", method="magnitude", group_size=32))
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight_bitmap"].fill_(fill)
    save_file(tensors, file, metadata={"format": "pt"})
    done = run(str(tmp_path / "out"), "--dataset", text, "--window", "32", "--limit", "2", "--json")
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert "model.layers.0.mlp.up_proj.weight_bitmap: and weight_row_offsets differ" in done.stderr


def test_without_a_directory_the_embedded_model_is_measured_with_a_note() -> None:
    done = run("--limit", "1", "--window", "64")
    assert done.exit_code == 0, done.output
    assert "bookllama-7m" in done.stdout
    assert "knows books, not Wikipedia" in done.stderr
    assert "knows books" not in run("--limit", "1", "--window", "64", "--quiet").stderr


def test_warnings_go_to_stderr(save_model: Callable[..., Path], text: str, tmp_path: Path) -> None:
    long = tmp_path / "long.txt"
    long.write_text(Path(text).read_text() * 10)
    model = save_model("Llama", num_hidden_layers=1, max_position_embeddings=2048)
    done = run(str(model), "--protocol", "wikitext2-2048", "--dataset", str(long), "--limit", "1", "--json")
    assert done.exit_code == 0, done.output
    assert "not WikiText-2's test split" in done.stderr
    assert json.loads(done.stdout)["warnings"]
