"""The whole journey on tiny models: what is written, that it is the same every time, and what is left when it fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress_llm.compress_cli.runs import quantize as module
from compress_llm.compress_cli.runs.job import config_json, prepare
from compress_llm.compress_cli.runs.quantize import quantize
from compress_llm.compress_cli.runs.recipe import Recipe, Rule
from compress_llm.formats.checkpoint import Checkpoint
from compress_llm.formats.errors import InputError
from compress_llm.formats.packings import packing
from compress_llm.formats.replacing import staging_path
from compress_llm.kernels.load import load

TEXT = Path(__file__).with_name("calibration.txt")
SMALL_RUN = {"num_samples": 3, "seq_len": 16, "batch_size": 2, "dataset": str(TEXT)}
RECIPES = {
    "rtn": Recipe(group_size=32),
    "asym": Recipe(scheme="W4A16_ASYM", group_size="channel"),
    "int8": Recipe(scheme="W8A16"),
    "w8a8": Recipe(scheme="W8A8"),
    "static": Recipe(scheme="W8A8_STATIC", **SMALL_RUN),
    "mixed": Recipe(group_size=32, rules=(Rule("down_proj", "W8A8"),)),
    "head": Recipe(group_size=32, lm_head="W8A16"),
    "gptq": Recipe(group_size=32, method="gptq", **SMALL_RUN),
    "awq,gptq": Recipe(group_size=32, method="awq,gptq", **SMALL_RUN),
    "smoothquant": Recipe(scheme="W8A8", method="smoothquant,gptq", **SMALL_RUN),
    "hadamard": Recipe(group_size=32, method="hadamard"),
    "hadamard,gptq": Recipe(scheme="NVFP4", method="hadamard,gptq", lm_head="W8A8", **SMALL_RUN),
    "awq,hadamard": Recipe(scheme="W8A8_STATIC", method="awq,hadamard", **SMALL_RUN),
    "hqq": Recipe(scheme="W4A16_ASYM", group_size=32, method="hqq"),
    "auto": Recipe(group_size=32, method="auto", **{**SMALL_RUN, "batch_size": 8}),
    "data": Recipe(group_size=32, **SMALL_RUN),
    "nvfp4": Recipe(scheme="NVFP4", method="awq,gptq", **SMALL_RUN),
    "mxfp8": Recipe(scheme="MXFP8"),
    "fp8": Recipe(scheme="FP8", method="smoothquant,gptq", **SMALL_RUN),
    "magnitude": Recipe(scheme="SPARSE50", method="magnitude", sparse_layout="bitmap"),
    "sparsegpt": Recipe(scheme="SPARSE50", refit=True, **SMALL_RUN),
    "owl": Recipe(scheme="SPARSE50", method="wanda", allocate="owl", **SMALL_RUN),
    "sparse codes": Recipe(scheme="SPARSE50_W4A16", group_size=32, **SMALL_RUN),
}


ALONE = ("self_attn.o", "mlp.down")


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != "run.json")
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


@pytest.mark.parametrize("name", RECIPES)
def test_same_bytes_again_and_what_the_plan_promised(name: str, tiny_llama: Path, tmp_path: Path) -> None:
    job = prepare(str(tiny_llama), RECIPES[name])
    first, second = tmp_path / "first", tmp_path / "second"
    report = quantize(str(tiny_llama), first, RECIPES[name])
    quantize(str(tiny_llama), second, RECIPES[name])
    assert contents(first) == contents(second)
    plain = ("compress_report.json", "compress_layers.csv", "README.md", "run.json")
    written = sum(path.stat().st_size for path in first.iterdir() if path.name not in plain)
    tensors = load_file(first / "model.safetensors")
    found = {key: (value.dtype, tuple(value.shape)) for key, value in tensors.items()}
    if all(layer.exact for layer in job.plan.layers):
        assert written == job.output_bytes
        assert found == job.plan.tensors
    else:
        assert written == pytest.approx(job.output_bytes, rel=0.03)
        assert found.keys() == job.plan.tensors.keys()
    assert all(0 < row.weight_error < (1.5 if job.methods.pruning else 0.3) for row in report.layers)
    assert sum(row.bytes for row in report.layers) == sum(
        tensors[name].nbytes for layer in job.plan.quantized for name in layer.outputs
    )
    calibrated = job.windows is not None
    assert all((row.output_error is not None) == calibrated for row in report.layers)
    assert json.loads((first / "compress_report.json").read_text())["totals"]["bytes_after"] == sum(
        value.nbytes for value in tensors.values()
    )


def test_the_card_of_a_rotated_output_says_what_transformers_leaves_out(tiny_llama: Path, tmp_path: Path) -> None:
    quantize(str(tiny_llama), tmp_path / "plain", RECIPES["rtn"])
    report = quantize(str(tiny_llama), tmp_path / "turned", RECIPES["hadamard"])
    cards = [(tmp_path / name / "README.md").read_text() for name in ("plain", "turned")]
    assert ["apply_transform_config" in card for card in cards] == [False, True]
    assert any("apply_transform_config" in warning for warning in report.warnings)


def test_the_card_of_our_own_format_names_no_other_engine(tiny_llama: Path, tmp_path: Path) -> None:
    quantize(str(tiny_llama), tmp_path / "out", Recipe(scheme="W4A16_HQQ", method="hqq", group_size=32))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "no other engine reads W4A16_HQQ" in card
    assert "vLLM" not in card


def test_the_card_says_what_the_run_did(save_model: Callable[..., Path], tmp_path: Path) -> None:
    model = save_model("Llama", tie_word_embeddings=True)
    quantize(str(model), tmp_path / "out", Recipe(scheme="W8A16", lm_head="W8A16"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "\n\n- --lm-head W8A16: it shares the embedding's weight, and is stored beside it\n\nEvery\nlayer" in card
    assert "`compressed-tensors`.\n\n- " in card


@pytest.mark.parametrize("method", ["rtn", "awq,gptq"])
@pytest.mark.parametrize(("scheme", "suffix"), [("NVFP4A16", "weight_global_scale"), ("FP8", "weight_scale")])
def test_what_engines_fuse_shares_the_scale_of_its_tensors(
    scheme: str, suffix: str, method: str, tiny_llama: Path, tmp_path: Path
) -> None:
    report = quantize(
        str(tiny_llama), tmp_path / "out", Recipe(scheme=scheme, method=method, scale_rule="max", **SMALL_RUN)
    )
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for block in (0, 1):
        for part, names in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
            found = [tensors[f"model.layers.{block}.{part}.{name}_proj.{suffix}"] for name in names]
            assert all(torch.equal(found[0], other) for other in found)
    others = {float(tensors[f"model.layers.{block}.{part}_proj.{suffix}"]) for block in (0, 1) for part in ALONE}
    assert len(others) > 1
    if scheme == "NVFP4A16":
        assert {float(row.details["global_scale"]) for row in report.layers} >= others


def test_the_scale_rule_is_named_in_report_and_config(tiny_llama: Path, tmp_path: Path) -> None:
    for scheme, asked, rule in (("MXFP4A16", None, "mse"), ("NVFP4A16", "four-over-six", "four-over-six")):
        report = quantize(str(tiny_llama), tmp_path / scheme, Recipe(scheme=scheme, scale_rule=asked))
        assert {row.details["scale_rule"] for row in report.layers} == {rule}
        config = json.loads((tmp_path / scheme / "config.json").read_text())
        assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["observer"] == rule
    with pytest.raises(InputError, match="--scale-rule even: is not for the scales of NVFP4A16"):
        prepare(str(tiny_llama), Recipe(scheme="NVFP4A16", scale_rule="even"))


def test_the_rule_of_inputs_goes_with_the_output_and_is_kept_to(tiny_llama: Path, tmp_path: Path) -> None:
    recipe = Recipe(scheme="NVFP4", input_scale_rule="mse", **SMALL_RUN)
    assert any("--input-scale-rule" in warning for warning in prepare(str(tiny_llama), recipe, device="cpu").warnings)
    for name, chosen in (("mse", recipe), ("max", replace(recipe, input_scale_rule=None))):
        report = quantize(str(tiny_llama), tmp_path / name, chosen, device="cpu")
        assert report.recipe.input_scale_rule == chosen.input_scale_rule
    best, largest = (load(tmp_path / name).model.layers[0].mlp.down_proj for name in ("mse", "max"))
    assert torch.equal(best.weight_rows(), largest.weight_rows())
    x = torch.randn(64, best.in_features, generator=torch.Generator().manual_seed(0))
    x *= 448 / best.tensors["input_global_scale"]  # within what was calibrated
    exact = x @ best.weight_rows().T
    assert (best(x) - exact).norm() < 0.95 * (largest(x) - exact).norm()


def test_the_rule_of_inputs_is_for_every_linear_that_has_the_choice(tiny_llama: Path) -> None:
    recipe = Recipe(
        scheme="W4A16", group_size=32, rules=(Rule("down_proj", "NVFP4"),), lm_head="NVFP4", input_scale_rule="MSE"
    )
    layers = {layer.name: layer.scheme for layer in prepare(str(tiny_llama), recipe, device="cpu").plan.layers}
    assert layers["lm_head"].activation.scale_rule == "mse"
    assert layers["model.layers.0.mlp.down_proj"].activation.scale_rule == "mse"
    assert layers["model.layers.0.mlp.up_proj"].activation is None


def test_the_command_names_the_embedded_model_as_commands_do() -> None:
    job = prepare("embedded", Recipe(), device="cpu")
    assert (job.argument, job.model) == ("embedded", "bookllama-7m")
    assert prepare(None, Recipe(), device="cpu").argument == "embedded"


def test_weights_without_scales_have_no_scale_rule(tiny_llama: Path) -> None:
    plan = prepare(str(tiny_llama), Recipe(scheme="SPARSE50", lm_head="W8A16", **SMALL_RUN)).plan
    groups = json.loads(config_json(plan))["quantization_config"]["config_groups"].values()
    rules = {group["format"]: group["weights"].get("observer") for group in groups}
    assert rules == {"compress-three-layer": None, "pack-quantized": "local-hessian"}


def test_kept_tensors_and_side_files_are_verbatim(tiny_llama: Path, tmp_path: Path) -> None:
    quantize(str(tiny_llama), tmp_path / "out", RECIPES["rtn"])
    source, written = Checkpoint.open(tiny_llama), Checkpoint.open(tmp_path / "out")
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        assert torch.equal(source.read(name), written.read(name))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tiny_llama / name).read_bytes()


def test_errors_in_the_report_are_those_of_what_was_written(tiny_llama: Path, tmp_path: Path) -> None:
    report = quantize(str(tiny_llama), tmp_path / "out", RECIPES["gptq"])
    job = prepare(str(tiny_llama), RECIPES["gptq"])
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for layer, row in zip(job.plan.quantized, report.layers, strict=True):
        assert layer.scheme is not None
        parts = {name.removeprefix(f"{layer.name}."): tensors[name] for name in layer.outputs}
        decoded = packing(layer.scheme).unpack(parts, layer.scheme, layer.shape).dequantize().double()
        weight = Checkpoint.open(tiny_llama).read(layer.source).double()
        assert row.weight_error == pytest.approx(float((weight - decoded).norm() / weight.norm()), rel=1e-6)


def test_sharded_source_gives_the_bytes_of_the_single_file(save_model: Callable[..., Path], tmp_path: Path) -> None:
    one, many = save_model("Llama", seed=4), save_model("Llama", seed=4, max_shard_size="300KB")
    assert len(list(many.glob("*.safetensors"))) > 2
    for model, out in ((one, "a"), (many, "b")):
        quantize(str(model), tmp_path / out, RECIPES["rtn"])
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["rtn", "gptq"])
@pytest.mark.parametrize("tensor", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_number_is_named_and_nothing_is_left(
    name: str, tensor: str, value: float, save_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = save_model("Llama", vocab_size=8192, tie_word_embeddings=True)
    tensors = load_file(model / "model.safetensors")
    tensors[tensor][3, 5] = value
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "out"
    with pytest.raises(InputError, match=tensor):
        quantize(str(model), out, RECIPES[name])
    assert list(tmp_path.iterdir()) == []


class Killed(BaseException):
    """Stands for a kill: nothing in the package may catch it."""


@pytest.mark.parametrize(
    ("name", "after"),
    [
        *(("rtn", unit) for unit in range(4)),
        ("gptq", 1),
        ("hadamard,gptq", 1),
        ("awq,gptq", 2),
        ("static", 1),
        ("head", 2),
        ("sparsegpt", 1),
        ("owl", 2),
    ],
)
def test_resumed_after_any_unit_gives_the_same_bytes(
    name: str, after: int, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    quantize(str(tiny_llama), whole, RECIPES[name])
    record = module.Journal.record

    def record_and_die(self: module.Journal, part: int, *rest: object) -> None:
        record(self, part, *rest)  # type: ignore[arg-type]
        if part == after:
            raise Killed

    monkeypatch.setattr(module.Journal, "record", record_and_die)
    with pytest.raises(Killed):
        quantize(str(tiny_llama), out, RECIPES[name])
    monkeypatch.undo()
    assert not out.exists() and staging_path(out).exists()
    quantize(str(tiny_llama), out, RECIPES[name], resume=True)
    assert contents(out) == contents(whole)
    assert not staging_path(out).exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"recipe": Recipe(group_size=16)}, ("recipe.group_size", "32", "16")),
        ({"threads": 7}, ("threads", "7")),
    ],
)
def test_resume_with_other_settings_is_refused_and_keeps_the_work(
    change: dict[str, object],
    words: tuple[str, ...],
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"

    def die(*_args: object) -> None:
        raise Killed

    monkeypatch.setattr(module, "_finish", die)
    with pytest.raises(Killed):
        quantize(str(tiny_llama), out, RECIPES["rtn"])
    monkeypatch.undo()
    if "threads" in change:
        monkeypatch.setattr(torch, "get_num_threads", lambda: change["threads"])
    with pytest.raises(InputError) as caught:
        quantize(str(tiny_llama), out, change.get("recipe", RECIPES["rtn"]), resume=True)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words)
    assert (staging_path(out) / "journal.json").exists()


def test_too_little_memory_is_refused_before_any_work(tiny_llama: Path) -> None:
    for limit, shown in ((100 << 20, "104.9 MB"), (1024, "1.0 kB")):
        with pytest.raises(InputError, match=rf"--max-memory {shown}: this run needs about \d+\.\d MB"):
            prepare(str(tiny_llama), RECIPES["gptq"], max_memory=limit)


@pytest.mark.parametrize(("key", "value"), [("hidden_size", 32), ("vocab_size", 64), ("num_hidden_layers", 3)])
def test_a_config_that_contradicts_the_weights_is_refused(
    key: str, value: int, save_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = save_model("Llama")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(InputError, match=r"config\.json|num_hidden_layers"):
        quantize(str(model), tmp_path / "out", RECIPES["gptq"])


def test_unknown_architectures_are_calibrated_without_folds(save_model: Callable[..., Path], tmp_path: Path) -> None:
    model = save_model("GPTNeoX", rotary_pct=1.0)
    report = quantize(str(model), tmp_path / "out", RECIPES["awq,gptq"])
    assert "unknown architecture" in report.warnings[0]
    assert all(row.output_error is not None and not row.transformed for row in report.layers)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "embed_out" in config["quantization_config"]["ignore"]


def test_weights_that_are_stored_the_other_way_round_are_refused(save_model: Callable[..., Path]) -> None:
    model = save_model("GPT2", n_embd=32, n_layer=1, n_head=2)
    with pytest.raises(InputError, match="Conv1D"):
        prepare(str(model), Recipe(group_size=16))


def test_experts_and_fused_projections_go_the_whole_way(save_model: Callable[..., Path], tmp_path: Path) -> None:
    kinds = {"Mixtral": {"num_local_experts": 2}, "Phi3": {}, "Gemma2": {}}
    for kind, extra in kinds.items():
        model = save_model(kind, **extra)
        for method in ("rtn", "awq,gptq"):
            report = quantize(
                str(model), tmp_path / f"{kind}-{method}", Recipe(method=method, group_size=32, **SMALL_RUN)
            )
            assert all(row.weight_error < 0.5 for row in report.layers)
