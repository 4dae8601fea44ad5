"""What is shown of a directory is what its headers and its config say, packed by us, by others, or plain."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from compress_llm.compress_cli.runs.inspect import inspect
from compress_llm.compress_cli.runs.quantize import quantize
from compress_llm.compress_cli.runs.recipe import Recipe, Rule
from compress_llm.formats.errors import InputError

BITMAP = Recipe(scheme="SPARSE50", method="magnitude", sparse_layout="bitmap")


@pytest.fixture(scope="module")
def model(save_model: Callable[..., Path]) -> Path:
    return save_model("Llama", tie_word_embeddings=False, vocab_size=96)


@pytest.fixture
def out(model: Path, tmp_path: Path) -> Path:
    quantize(str(model), tmp_path / "out", Recipe(group_size=32, rules=(Rule("down_proj", "W8A8"),)))
    return tmp_path / "out"


def test_a_plain_model(model: Path) -> None:
    shown = inspect(model)
    tensors = load_file(model / "model.safetensors")
    assert (shown.format, shown.totals.packed_layers, shown.totals.bits_per_weight) == (None, 0, None)
    assert shown.totals.bits_per_weight_model == 16
    assert shown.totals.parameters == sum(tensor.numel() for tensor in tensors.values())
    assert {f"{row.name}.weight" for row in shown.layers} == {n for n, tensor in tensors.items() if tensor.dim() == 2}
    assert all((row.scheme, row.dtype, row.bits_per_weight) == (None, "bfloat16", 16) for row in shown.layers)


def test_a_packed_model_as_its_report_says(out: Path) -> None:
    shown = inspect(out)
    report = json.loads((out / "compress_report.json").read_text())
    rows = {row.name: row for row in shown.layers}
    assert {name for name, row in rows.items() if row.scheme} == {row["name"] for row in report["layers"]}
    for row in report["layers"]:
        seen = rows[row["name"]]
        assert (seen.scheme, seen.group_size, seen.method) == (row["scheme"], row["group_size"], row["method"])
        assert (seen.bytes, seen.bits_per_weight) == (row["bytes"], row["bits_per_weight"])
        assert seen.weight_error == row["weight_error"]
    assert rows["model.layers.0.mlp.down_proj"].shape == (64, 96)
    assert rows["model.embed_tokens"].scheme is None
    assert shown.format == "mixed-precision"
    assert shown.totals.bytes == report["totals"]["bytes_after"]
    assert shown.totals.bits_per_weight == pytest.approx(report["totals"]["bits_per_weight"])
    assert shown.totals.rest_bytes + sum(row.bytes for row in shown.layers) == shown.totals.bytes


def test_without_a_report_the_config_is_enough(out: Path) -> None:
    before = inspect(out)
    (out / "compress_report.json").unlink()
    after = inspect(out)
    assert [(row.name, row.scheme, row.bytes, row.shape) for row in after.layers] == [
        (row.name, row.scheme, row.bytes, row.shape) for row in before.layers
    ]
    assert after.totals == before.totals
    assert all(row.weight_error is None for row in after.layers)


def test_blocks_come_in_the_order_of_their_numbers(save_model: Callable[..., Path]) -> None:
    directory = save_model("Llama", num_hidden_layers=11, vocab_size=96, hidden_size=16, intermediate_size=16)
    numbers = [int(row.name.split(".")[2]) for row in inspect(directory).layers if ".layers." in row.name]
    assert numbers == sorted(numbers)


def test_what_is_not_read_is_a_warning(out: Path) -> None:
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (out / "config.json").write_text(json.dumps(config))
    (out / "compress_report.json").write_text("{")
    shown = inspect(out)
    assert shown.format == "gptq"
    assert any("'gptq' checkpoints are not read" in warning for warning in shown.warnings)
    assert any("is not a report" in warning for warning in shown.warnings)
    assert shown.totals.bytes == inspect(out).totals.bytes


@pytest.mark.parametrize(
    ("recipe", "suffix", "said"),
    [
        (Recipe(scheme="NVFP4A16"), "weight_global_scale", "is missing"),
        (Recipe(scheme="NVFP4A16"), "weight_packed", "is missing"),
        (Recipe(scheme="NVFP4A16"), "weight_scale", "is missing"),
        (Recipe(scheme="FP8_DYNAMIC"), "weight_scale", "is missing"),
        (BITMAP, "weight_values", "is missing"),
        (BITMAP, "weight_shape", "is missing"),
        (BITMAP, "weight_row_offsets", r"is int64 \[64\] where the scheme asks for int64 \[65\]"),
        (BITMAP, "weight_values", r"has dtype float64"),
    ],
    ids=lambda value: value.scheme if isinstance(value, Recipe) else value,
)
def test_a_linear_that_is_not_whole_is_a_warning(
    model: Path, tmp_path: Path, recipe: Recipe, suffix: str, said: str
) -> None:
    quantize(str(model), tmp_path / "out", recipe)
    assert inspect(tmp_path / "out").warnings == []
    file, name = tmp_path / "out" / "model.safetensors", f"model.layers.1.mlp.down_proj.{suffix}"
    tensors = load_file(file)
    taken = tensors.pop(name)
    if "float64" in said:
        tensors[name] = taken.double()
    elif "where" in said:
        tensors[name] = taken[:-1].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    shown = inspect(tmp_path / "out")
    (warning,) = shown.warnings
    assert re.match(rf"model\.layers\.1\.mlp\.down_proj\.\w+: .*{said}", warning), warning
    assert suffix in warning or "is missing or no matrix" in warning
    assert shown.totals.rest_bytes + sum(row.bytes for row in shown.layers) == shown.totals.bytes
    assert shown.totals.packed_layers >= 13


@pytest.mark.parametrize("recipe", [Recipe(group_size=32), BITMAP, replace(BITMAP, sparse_layout="three-layer")])
def test_a_shape_that_nothing_fits_is_the_one_to_blame(model: Path, tmp_path: Path, recipe: Recipe) -> None:
    quantize(str(model), tmp_path / "out", recipe)
    file, name = tmp_path / "out" / "model.safetensors", "model.layers.1.mlp.down_proj.weight_shape"
    tensors = load_file(file)
    tensors[name] = tensors[name].flip(0)
    save_file(tensors, file, metadata={"format": "pt"})
    (warning,) = inspect(tmp_path / "out").warnings
    assert warning.startswith(f"{name}: says [96, 64], which does not fit weight_")


def test_no_model_directory(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no config\.json"):
        inspect(tmp_path)
