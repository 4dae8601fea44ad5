"""The plan: what becomes of every tensor, sizes to the byte, and every mistake that headers can show."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compress_llm.compress_cli.runs.methods import chain
from compress_llm.compress_cli.runs.plan import Plan, ignored_modules, make_plan, spec_bytes
from compress_llm.compress_cli.runs.recipe import Recipe, Rule, from_dict
from compress_llm.compress_cli.runs.report import totals
from compress_llm.formats.checkpoint import Checkpoint
from compress_llm.formats.errors import InputError


def plan_of(directory: Path, **recipe: object) -> Plan:
    return make_plan(from_dict({"group_size": 32, **recipe}), Checkpoint.open(directory))


def test_every_linear_of_the_blocks_is_quantised_and_the_rest_is_kept(tiny_llama: Path) -> None:
    plan = plan_of(tiny_llama)
    assert len(plan.quantized) == 14
    assert [layer.name for layer in plan.layers if layer.scheme is None] == ["lm_head"]
    kept = {name for unit in plan.units for name in unit.kept}
    assert kept == {name for name in plan.checkpoint.tensors if "norm" in name or "embed" in name or "lm_head" in name}
    assert [unit.block for unit in plan.units] == [None, 0, 1, None]


def test_group_size_auto_fits_each_layer(tiny_llama: Path) -> None:
    sizes = {
        layer.name.rpartition(".")[2]: layer.scheme.group_size
        for layer in plan_of(tiny_llama, group_size="auto").quantized
    }
    assert sizes["q_proj"] == 64
    assert sizes["down_proj"] == 32


def test_group_size_auto_falls_back_to_channel(save_model: Callable[..., Path]) -> None:
    model = save_model("Llama", hidden_size=72, head_dim=18, intermediate_size=96)
    sizes = {
        layer.name.rpartition(".")[2]: layer.scheme.group_size for layer in plan_of(model, group_size="auto").quantized
    }
    assert sizes["q_proj"] is None and sizes["down_proj"] == 32


def test_rules_come_first_and_in_order(tiny_llama: Path) -> None:
    rules = [{"target": "o_proj", "scheme": "W8A16"}, {"target": "*", "scheme": "W4A16_ASYM", "group_size": 16}]
    chosen = {layer.name: layer.scheme for layer in plan_of(tiny_llama, rules=rules).quantized}
    assert chosen["model.layers.0.self_attn.o_proj"].name == "W8A16"
    assert chosen["model.layers.0.mlp.up_proj"].name == "W4A16_ASYM"
    assert chosen["model.layers.0.mlp.up_proj"].group_size == 16


def test_a_tied_head_gets_a_weight_of_its_own_when_asked(save_model: Callable[..., Path]) -> None:
    model = save_model("Llama", tie_word_embeddings=True)
    assert not plan_of(model).packs_head
    plan = plan_of(model, lm_head="W8A16", group_size="channel")
    head = plan.layers[-1]
    assert plan.packs_head and head.name == "lm_head" and head.bytes_before == 0
    assert "model.embed_tokens.weight" in plan.tensors and "lm_head.weight_packed" in plan.tensors
    assert plan.warnings == ("--lm-head W8A16: it shares the embedding's weight, and is stored beside it",)
    parameters = sum(math.prod(info.shape) for info in plan.checkpoint.tensors.values()) + head.weights
    after = sum(spec_bytes(spec) for spec in plan.tensors.values())
    assert totals(plan)["bits_per_weight_model"] == 8 * after / parameters


def test_routers_are_listed_as_ignored(save_model: Callable[..., Path]) -> None:
    model = save_model("Mixtral", num_local_experts=2)
    names = ignored_modules(plan_of(model))
    assert "model.layers.1.block_sparse_moe.gate" in names


def test_the_head_of_an_unknown_architecture_is_ignored_by_its_usual_name(save_model: Callable[..., Path]) -> None:
    model = save_model("Llama", tie_word_embeddings=True)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "of_tomorrow"}))
    assert "lm_head" in ignored_modules(plan_of(model))


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ({"group_size": 48}, ("--group-size 48", "64 inputs", "use 32, 16, channel or auto")),
        ({"ignore": ["*.nothing"]}, ("--ignore *.nothing", "matches no linear")),
        ({"targets": ["q_pro"]}, ("--target q_pro", "matches no linear")),
        ({"targets": ["q_proj"]}, ("k_proj", "q_proj", "engines fuse")),
        ({"rules": [{"target": "up_proj", "scheme": "W8A16"}]}, ("gate_proj", "up_proj", "engines fuse")),
        ({"targets": ["lm_head"]}, ("--target lm_head", "--lm-head")),
        ({"ignore": ["re:.*"]}, ("nothing to quantise",)),
        ({"scheme": "W8A8", "group_size": 32}, ("--group-size 32", "W8A8", "leave it out")),
        ({"scheme": "W8A8", "group_size": None, "symmetric": False}, ("--asym", "W8A8")),
    ],
)
def test_mistakes_are_named(tiny_llama: Path, recipe: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        plan_of(tiny_llama, **recipe)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_quantised_source_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(tiny_llama, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(InputError, match="already quantised"):
        plan_of(copy)


def test_a_dtype_that_cannot_be_quantised_is_refused(save_model: Callable[..., Path]) -> None:
    model = save_model("Llama", dtype=torch.float64)
    with pytest.raises(InputError, match=r"model\.layers\.0\..*has dtype float64"):
        plan_of(model)


def test_defaults_are_the_empty_recipe() -> None:
    assert from_dict({}) == Recipe()


def test_rotations_fit_every_linear_or_are_refused_with_its_width(tiny_llama: Path) -> None:
    recipe = Recipe(group_size=32, method="hadamard", rules=(Rule("down_proj", "W8A8"),))
    plan = make_plan(recipe, Checkpoint.open(tiny_llama), chain(recipe).fitted)
    blocks = {layer.name.rpartition(".")[2]: layer.scheme.rotation for layer in plan.quantized if layer.scheme}
    assert len(blocks) == 7 and set(blocks.values()) == {32}
    assert any("transform_config" in warning for warning in plan.warnings)
    wide = replace(recipe, options={"hadamard": {"block": 64}})
    with pytest.raises(InputError, match="block 64: does not fit 96 inputs"):
        make_plan(wide, Checkpoint.open(tiny_llama), chain(wide).fitted)


@pytest.mark.parametrize("size", [None, "auto"])
def test_rows_that_blocks_do_not_divide_are_refused(save_model: Callable[..., Path], size: str | None) -> None:
    model = save_model("Llama", hidden_size=72, head_dim=18, intermediate_size=96)
    for scheme, width in (("NVFP4A16", 16), ("MXFP4", 32), ("FP8_BLOCK", 128)):
        with pytest.raises(InputError, match=f"--scheme {scheme}: has blocks of {width}, which do not divide the"):
            plan_of(model, scheme=scheme, group_size=size)
    assert plan_of(model, scheme="MXFP4", group_size=None, targets=["*.down_proj"]).quantized
    with pytest.raises(InputError, match="scheme NVFP4 has groups of 16"):
        plan_of(model, scheme="NVFP4", group_size=64)


def test_blocks_of_rows_end_where_fused_linears_end(save_model: Callable[..., Path]) -> None:
    model = save_model("Llama", hidden_size=128, intermediate_size=256, head_dim=32)
    with pytest.raises(InputError, match="blocks of 128 rows, which do not divide the 64 outputs of .*k_proj"):
        plan_of(model, scheme="FP8_BLOCK", group_size=None)
    alone = plan_of(model, scheme="FP8_BLOCK", group_size=None, targets=["*.o_proj", "*.down_proj"])
    assert {layer.outputs[f"{layer.name}.weight_scale"][1] for layer in alone.quantized} == {(1, 1), (1, 2)}


@pytest.mark.parametrize(
    ("scheme", "bits"), [("NVFP4A16", 4.5), ("MXFP4A16", 4.25), ("MXFP8", 8.25), ("FP8_DYNAMIC", 8.125)]
)
def test_sizes_of_block_formats(save_model: Callable[..., Path], scheme: str, bits: float) -> None:
    model = save_model("Llama", hidden_size=128, intermediate_size=256, head_dim=32)
    layer = next(layer for layer in plan_of(model, scheme=scheme, group_size=None).quantized if "q_proj" in layer.name)
    assert layer.bits_per_weight == pytest.approx(bits, abs=0.003)


def test_experts_that_transformers_does_not_read_come_with_a_warning(
    tiny_llama: Path, save_model: Callable[..., Path]
) -> None:
    experts = save_model("Mixtral", num_local_experts=2)
    for directory, scheme, warned in ((experts, "NVFP4A16", 1), (experts, "W4A16", 0), (tiny_llama, "NVFP4A16", 0)):
        size = {"group_size": 32} if scheme == "W4A16" else {}
        plan = make_plan(from_dict({"scheme": scheme, **size}), Checkpoint.open(directory))
        assert sum("NVFP4 experts" in warning for warning in plan.warnings) == warned
