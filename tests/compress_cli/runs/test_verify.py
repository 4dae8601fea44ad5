"""Every kind of damage to an output is found and named, and what is whole passes, whatever the method."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress_llm.compress_cli.runs.quantize import quantize
from compress_llm.compress_cli.runs.recipe import Recipe, Rule
from compress_llm.compress_cli.runs.verify import Verification, verify
from compress_llm.formats.errors import InputError
from compress_llm.formats.tensor_bytes import sha256_of, sha256_of_file

SMALL_RUN = {"num_samples": 3, "seq_len": 16, "batch_size": 2}
RECIPES = {
    "int4": Recipe(group_size=32),
    "asym": Recipe(scheme="W4A16", symmetric=False, group_size=16),
    "channel": Recipe(scheme="W8A16"),
    "w8a8": Recipe(scheme="W8A8"),
    "static": Recipe(scheme="W8A8_STATIC", **SMALL_RUN),
    "mixed": Recipe(group_size=32, rules=(Rule("down_proj", "W8A8"),), ignore=("o_proj",), lm_head="W8A16"),
    "gptq": Recipe(group_size=32, method="gptq", **SMALL_RUN),
    "sparse": Recipe(scheme="SPARSE50", method="wanda", **SMALL_RUN),
    "bitmap": Recipe(scheme="SPARSE50", method="magnitude", sparse_layout="bitmap", sparsity=0.6, lm_head="W8A16"),
    "sparse codes": Recipe(scheme="SPARSE50_W4A16", group_size=32, pattern="2:4", method="magnitude"),
    "awq": Recipe(group_size=32, method="awq,rtn", **SMALL_RUN),
    "hadamard": Recipe(scheme="MXFP4", method="hadamard,rtn", lm_head="W8A16"),
    "awq,hadamard": Recipe(group_size=32, method="awq,hadamard,gptq", **SMALL_RUN),
    "inputs by mse": Recipe(scheme="NVFP4", method="rtn", input_scale_rule="mse", **SMALL_RUN),
}
SCALE = "model.layers.1.mlp.up_proj.weight_scale"


@pytest.fixture(scope="module")
def model(save_model: Callable[..., Path]) -> Path:
    return save_model("Llama", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def tied(save_model: Callable[..., Path]) -> Path:
    return save_model("Llama", tie_word_embeddings=True, seed=1)


@pytest.fixture(scope="module")
def packed(save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small model and its int4 output; never change them in place."""
    source = save_model("Llama", tie_word_embeddings=True, vocab_size=96, num_hidden_layers=2)
    out = tmp_path_factory.mktemp("packed") / "out"
    quantize(str(source), out, RECIPES["int4"])
    return source, out


@pytest.fixture
def out(packed: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed[1], tmp_path / "out"))


def failed(result: Verification) -> dict[str, str]:
    assert result.passed == all(item.passed for item in result.checks)
    return {item.name: item.detail for item in result.checks if not item.passed}


def edit_report(out: Path, edit: Callable[[dict], object]) -> None:
    report = json.loads((out / "compress_report.json").read_text())
    edit(report)
    (out / "compress_report.json").write_text(json.dumps(report))


def forge(out: Path, changes: Mapping[str, Tensor | None]) -> None:
    """Change tensors (None removes one) and put the new hashes into the report, as a wrong program would have."""
    file = out / "model.safetensors"
    tensors = {name: tensor for name, tensor in {**load_file(file), **changes}.items() if tensor is not None}
    save_file(tensors, file, {"format": "pt"})

    def edit(report: dict) -> None:
        report["files"][file.name] = sha256_of_file(file)
        for name, tensor in changes.items():
            if tensor is not None and name in report["tensors"]:
                report["tensors"][name]["sha256"] = sha256_of(tensor)

    edit_report(out, edit)


@pytest.mark.parametrize("name", RECIPES)
def test_a_whole_output_passes(name: str, model: Path, tied: Path, tmp_path: Path) -> None:
    source = tied if name == "mixed" else model
    quantize(str(source), tmp_path / "out", RECIPES[name])
    result = verify(tmp_path / "out", source)
    assert failed(result) == {}
    assert {"hashes", "decoding", "weight errors", "kept tensors"} <= {item.name for item in result.checks}
    assert failed(verify(tmp_path / "out")) == {}


def test_experts_pass(save_model: Callable[..., Path], tmp_path: Path) -> None:
    source = save_model("Mixtral", num_local_experts=2, vocab_size=96)
    quantize(str(source), tmp_path / "out", Recipe(group_size=32))
    assert failed(verify(tmp_path / "out", source)) == {}


def test_a_single_flipped_bit_is_found_wherever_it_is(out: Path) -> None:
    file = out / "model.safetensors"
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    rng = random.Random(0)
    places = [0, 7, *rng.sample(range(8, header), 20), *rng.sample(range(header, len(whole)), 20), len(whole) - 1]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        found = failed(verify(out))
        assert "model.safetensors has changed" in found["files"]
        assert (place < header) or "has changed" in found["hashes"]


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "compress_layers.csv"])
def test_a_changed_side_file_is_found(out: Path, name: str) -> None:
    (out / name).write_bytes((out / name).read_bytes() + b" ")
    assert f"{name} has changed" in failed(verify(out))["files"]
    (out / name).unlink()
    assert f"{name} is missing" in failed(verify(out))["files"]


def test_the_model_card_may_be_edited(out: Path) -> None:
    (out / "README.md").write_text("# My model")
    assert failed(verify(out)) == {}


def test_a_stray_weight_file_is_found(out: Path) -> None:
    (out / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin is a stray weight file" in failed(verify(out))["files"]


def test_missing_and_stray_tensors_are_named(out: Path) -> None:
    forge(out, {SCALE: None, "model.extra": torch.ones(1)})
    found = failed(verify(out))
    assert f"'{SCALE}' is missing; 'model.extra' is a stray" in found["tensors"]
    assert "model.layers.1.mlp.up_proj" in found["quantization_config"]


def test_another_shape_or_dtype_is_named(out: Path) -> None:
    norm = "model.norm.weight"
    tensor = load_file(out / "model.safetensors")[norm]
    forge(out, {norm: tensor.float()})
    assert f"'{norm}' is float32 [64], the report says bfloat16 [64]" in failed(verify(out))["shapes and dtypes"]
    forge(out, {norm: tensor[:32].clone()})
    assert f"'{norm}' is bfloat16 [32]" in failed(verify(out))["shapes and dtypes"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_found(out: Path, value: float) -> None:
    tensors = load_file(out / "model.safetensors")
    scale, norm = tensors[SCALE].clone(), tensors["model.norm.weight"].clone()
    scale[3, 1], norm[5] = value, value
    forge(out, {SCALE: scale, "model.norm.weight": norm})
    found = failed(verify(out))
    assert f"'{SCALE}' holds NaN or Inf" in found["finite"]
    assert "'model.norm.weight' holds NaN or Inf" in found["finite"]
    assert "model.layers.1.mlp.up_proj" in found["decoding"]


@pytest.mark.parametrize("factor", [1.5, 1 + 2**-7, 2.0])
def test_a_plausible_but_wrong_scale_is_found_with_the_reference(
    packed: tuple[Path, Path], out: Path, factor: float
) -> None:
    scale = load_file(out / "model.safetensors")[SCALE]
    scale[3, 1] *= factor
    forge(out, {SCALE: scale})
    assert failed(verify(out)) == {}
    found = failed(verify(out, packed[0]))
    assert list(found) == ["weight errors"]
    assert "'model.layers.1.mlp.up_proj' has weight error" in found["weight errors"]


def test_a_wrong_scale_of_a_rescaled_layer_is_found(tied: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize(str(tied), out, RECIPES["awq"])
    scale = load_file(out / "model.safetensors")[SCALE]
    scale[::2, 1] *= 1.5
    forge(out, {SCALE: scale})
    assert "away from any rescaling of the reference" in failed(verify(out, tied))["weight errors"]


def test_a_kept_tensor_that_is_not_the_sources_is_found(packed: tuple[Path, Path], out: Path) -> None:
    name = "model.embed_tokens.weight"
    changed = load_file(out / "model.safetensors")[name]
    changed[0, 0] += 1
    forge(out, {name: changed})
    assert failed(verify(out, packed[0])) == {"kept tensors": f"'{name}' differs from the reference"}


def test_a_lost_tensor_is_found(packed: tuple[Path, Path], out: Path) -> None:
    forge(out, {"model.norm.weight": None})
    edit_report(out, lambda report: report["tensors"].pop("model.norm.weight"))
    assert failed(verify(out, packed[0]))["kept tensors"] == "'model.norm.weight' is lost"


def test_another_reference_is_told(out: Path, model: Path) -> None:
    assert {"source", "weight errors", "kept tensors"} <= failed(verify(out, model)).keys()


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda config: config["ignore"].append("model.layers.0.mlp.up_proj"), "not packed according to config.json"),
        (lambda config: config.update(quant_method="awq"), "'awq' checkpoints are not read"),
        (
            lambda config: config["config_groups"]["group_0"]["weights"].update(group_size=16),
            "group 16, in config.json",
        ),
    ],
)
def test_a_config_that_says_something_else_is_found(out: Path, edit: Callable[[dict], object], words: str) -> None:
    config = json.loads((out / "config.json").read_text())
    edit(config["quantization_config"])
    (out / "config.json").write_text(json.dumps(config))
    edit_report(out, lambda report: report["files"].update({"config.json": sha256_of_file(out / "config.json")}))
    assert words in failed(verify(out))["quantization_config"]


def test_another_rule_of_inputs_is_found(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize(str(model), out, RECIPES["inputs by mse"])
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"].pop("observer_kwargs")
    (out / "config.json").write_text(json.dumps(config))
    edit_report(out, lambda report: report["files"].update({"config.json": sha256_of_file(out / "config.json")}))
    assert "by max in config.json and by mse in the report" in failed(verify(out))["quantization_config"]


def test_a_report_that_promises_other_layers_is_found(out: Path) -> None:
    edit_report(out, lambda report: report["layers"].pop())
    assert "not packed according to the report" in failed(verify(out))["quantization_config"]
    edit_report(out, lambda report: report["layers"][0].update(bytes=1))
    assert "the report says 1" in failed(verify(out))["quantization_config"]


@pytest.mark.parametrize("damage", [b"", b"{}", b"[1]", b'{"layers": 3}', b"\xff"])
def test_a_damaged_report_fails_and_a_missing_one_is_the_users_error(out: Path, damage: bytes) -> None:
    (out / "compress_report.json").write_bytes(damage)
    assert list(failed(verify(out))) == ["report"]
    (out / "compress_report.json").unlink()
    with pytest.raises(InputError, match="has no compress_report.json to check against"):
        verify(out)


def test_a_missing_weight_file_fails(out: Path) -> None:
    (out / "model.safetensors").unlink()
    assert failed(verify(out)).keys() == {"files", "headers"}


def test_no_directory_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such directory"):
        verify(tmp_path / "none" / "at" / "all")
