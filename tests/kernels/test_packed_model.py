"""Packed directories against dense ones that hold the decoded weights, and against compressed-tensors' own runtime."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from compress_llm.compress_cli.runs.quantize import quantize
from compress_llm.compress_cli.runs.recipe import Recipe
from compress_llm.formats.errors import InputError
from compress_llm.formats.scheme import SCHEMES
from compress_llm.kernels.load import load
from compress_llm.kernels.packed_linear import PackedLinear

IDS = torch.tensor([[1, 5, 9, 33, 90, 2, 7, 7, 61, 4, 80, 13], [3, 2, 1, 0, 44, 95, 12, 70, 6, 6, 28, 50]])
GROUP = SCHEMES["W4A16"].with_group(8)
ASYMMETRIC = SCHEMES["W4A16_ASYM"].with_group(16)
CASES = [
    ("llama", GROUP),
    ("llama", ASYMMETRIC),
    ("mistral", SCHEMES["W8A16"]),
    ("qwen2", GROUP),  # biases, tied embeddings
    ("qwen3", SCHEMES["W4A16"].with_group("channel")),
    ("gemma2", ASYMMETRIC),
    ("gemma3_text", GROUP),
    ("phi3", SCHEMES["W8A16"].with_group(8)),
    ("mixtral", ASYMMETRIC),
    ("qwen3_moe", GROUP),
]


def packed_linears(model: nn.Module) -> dict[str, PackedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}


@pytest.mark.parametrize(("name", "scheme"), CASES, ids=lambda value: getattr(value, "name", value))
def test_a_packed_model_is_the_dense_one_with_decoded_weights(pack, name, scheme):
    packed, dense = pack(name, scheme)
    model = load(packed)
    expected = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    assert model.dtype == torch.float32
    assert not model.training
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=1e-5, atol=1e-5)


def test_only_packed_linears_are_packed_and_nothing_dense_is_kept(pack):
    packed, dense = pack("mixtral", GROUP)
    model = load(packed, dtype=torch.bfloat16)
    with safe_open(packed / "model.safetensors", "pt") as file:
        scales = [name for name in file.keys() if name.endswith("weight_scale")]  # noqa: SIM118
    assert len(packed_linears(model)) == len(scales) == 2 * (4 + 4 * 3)
    assert not any(isinstance(module, nn.Linear) for name, module in model.named_modules() if name != "lm_head")
    held = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert held == sum(tensor.nbytes for tensor in load_file(packed / "model.safetensors").values())
    assert held < 0.6 * sum(tensor.nbytes for tensor in load_file(dense / "model.safetensors").values())


def test_generate_gives_what_the_dense_model_generates(pack):
    packed, dense = pack("qwen2", GROUP)
    model, expected = load(packed), AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    settings = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(IDS[:1], **settings), expected.generate(IDS[:1], **settings))


def test_the_generation_config_is_that_of_the_directory(pack):
    packed, _ = pack("llama", GROUP)
    (packed / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8], "max_new_tokens": 3}))
    model = load(packed)
    assert model.generation_config.eos_token_id == [7, 8]
    assert model.generate(IDS[:1], do_sample=False).shape[1] <= IDS.shape[1] + 3
    (packed / "generation_config.json").unlink()
    assert load(packed).generation_config.eos_token_id == 2
    (packed / "generation_config.json").write_text("{")
    with pytest.raises(InputError, match=r"generation_config\.json"):
        load(packed)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_packed_head(pack, name):
    """Also where it was tied: the embedding stays as it is, and the two have parted."""
    packed, dense = pack(name, GROUP, head=SCHEMES["W8A16"])
    model = load(packed)
    expected = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    head = model.get_output_embeddings()
    assert isinstance(head, PackedLinear)
    assert torch.equal(head.weight_rows(10, 20).float(), expected.lm_head.weight[10:20])
    assert torch.equal(model.get_input_embeddings().weight, expected.get_input_embeddings().weight)
    model.tie_weights()
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=1e-5, atol=1e-5)


def test_a_packed_head_parts_from_the_embedding_whatever_config_json_says(pack):
    packed, dense = pack("qwen2", GROUP, head=SCHEMES["W8A16"])
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    model, expected = load(packed), AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    model.tie_weights()
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=1e-5, atol=1e-5)


def test_tied_embeddings_are_one_tensor(pack):
    packed, _ = pack("qwen2", GROUP)
    model = load(packed)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_what_is_not_packed_takes_the_dtype_asked_for_and_scales_keep_theirs(pack):
    packed, _ = pack("qwen2", GROUP)
    model = load(packed, dtype=torch.float16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    assert {linear.weight_scale.dtype for linear in packed_linears(model).values()} == {torch.bfloat16}
    with torch.no_grad():
        assert model(IDS).logits.isfinite().all()


@pytest.mark.parametrize("scheme", [GROUP, SCHEMES["W8A8"], SCHEMES["W8A8_STATIC"]], ids=lambda scheme: scheme.name)
def test_every_layer_gives_what_compressed_tensors_gives_on_the_same_input(pack, scheme):
    packed, _ = pack("llama", scheme)
    model = load(packed)
    oracle = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.float32)
    compared: dict[str, float] = {}

    def compare(name: str):
        def hook(_module: nn.Module, args: tuple[torch.Tensor, ...], expected: torch.Tensor) -> None:
            result = model.get_submodule(name)(args[0])
            compared[name] = float((result - expected).norm() / expected.norm())

        return hook

    for name in packed_linears(model):
        oracle.get_submodule(name).register_forward_hook(compare(name))
    with torch.no_grad():
        oracle(IDS)
    assert len(compared) == 2 * 7
    assert max(compared.values()) < 1e-5


def edit(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors by (dotted) name; None takes one out."""
    tensors = {**load_file(directory / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({f"{UP}.weight_scale": None}, rf"{UP}\.weight_scale: is missing"),
        ({f"{UP}.weight_packed": None}, rf"{UP}\.weight_packed: is missing"),
        (
            {f"{UP}.{part}": None for part in ("weight_packed", "weight_scale", "weight_shape")},
            rf"{UP}\.weight': is missing",
        ),
        ({f"{UP}.weight_packed": torch.zeros(48, 3, dtype=torch.int32)}, rf"{UP}\.weight_packed: is int32 \[48, 3\]"),
        ({f"{UP}.weight_scale": torch.ones(48, 2)}, rf"{UP}\.weight_scale"),
        ({f"{UP}.weight_shape": torch.tensor([32, 48])}, rf"{UP}\.weight_shape: says \[32, 48\]"),
        ({f"{UP}.weight_g_idx": torch.zeros(32, dtype=torch.int32)}, rf"{UP}\.weight_g_idx: has no place"),
        ({"model.norm.weight": None}, r"model\.norm\.weight': is missing"),
        ({"model.norm.weight": torch.ones(3)}, r"model\.norm\.weight: is \[3\] where"),
        ({"model.layers.0.self_attn.k_scale": torch.ones(1)}, r"k_scale': has no place"),
        ({"model.layers.9.mlp.up_proj.weight_packed": torch.ones(1)}, r"layers\.9.*: has no place"),
        ({f"{UP}.bias": torch.ones(48)}, rf"{UP}\.bias': has no place"),
    ],
    ids=range(12),
)
def test_tensors_that_do_not_fit_are_named(pack, changes, said):
    packed, _ = pack("llama", GROUP)
    edit(packed, **changes)
    with pytest.raises(InputError, match=said):
        load(packed)


def test_tables_of_old_checkpoints_are_passed_over(pack):
    packed, _ = pack("llama", GROUP)
    edit(packed, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    load(packed)


def test_a_quantisation_that_is_not_read_is_an_input_error(pack):
    packed, _ = pack("llama", GROUP)
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(InputError, match="awq"):
        load(packed)


SPARSE = {
    "three-layer": Recipe(scheme="SPARSE50", method="magnitude"),
    "bitmap": Recipe(scheme="SPARSE50", method="magnitude", sparse_layout="bitmap"),
    "codes": Recipe(scheme="SPARSE50_W4A16", method="magnitude", group_size=32),
}


@pytest.fixture(scope="module")
def sparse(tiny_llama, tmp_path_factory):
    """`sparse(layout)`: a sparse output of quantize, made once."""
    made: dict[str, Path] = {}

    def output(layout: str) -> Path:
        if layout not in made:
            made[layout] = tmp_path_factory.mktemp(layout) / "out"
            quantize(str(tiny_llama), made[layout], SPARSE[layout], device="cpu")
        return made[layout]

    return output


@pytest.mark.parametrize(
    ("layout", "suffix", "value"),
    [
        ("codes", "weight_bitmap", 0xFF),
        ("codes", "weight_bitmap", 0),
        ("codes", "weight_row_offsets", -1),
        ("bitmap", "weight_bitmap", 0xFF),
        ("bitmap", "weight_bitmap", 0),
        ("bitmap", "weight_row_offsets", 10**9),
        ("three-layer", "weight_permutation", 99999),
        ("three-layer", "weight_permutation", 0),
        ("three-layer", "weight_positions", 0xFF),
        ("three-layer", "weight_steps", 0xFF),
        ("three-layer", "weight_step_offsets", -1),
        ("three-layer", "weight_residual_columns", 100000),
        ("three-layer", "weight_residual_columns", -1),
        ("three-layer", "weight_residual_offsets", 10**9),
    ],
)
def test_indices_that_lead_nowhere_are_named_when_a_model_is_loaded(sparse, tmp_path, layout, suffix, value):
    directory = shutil.copytree(sparse(layout), tmp_path / "damaged")
    file = next(
        file for file in directory.glob("*.safetensors") if any(name.startswith(UP) for name in load_file(file))
    )
    tensors = load_file(file)
    if suffix == "weight_residual_columns":  # so small a model has no residual: its first row gets one
        tensors[f"{UP}.weight_residual"] = torch.ones(1, dtype=torch.bfloat16)
        tensors[f"{UP}.weight_residual_offsets"][1:] = 1
        tensors[f"{UP}.{suffix}"] = torch.tensor([value], dtype=torch.int32)
    tensors[f"{UP}.{suffix}"][1 if suffix.endswith("offsets") else slice(None)] = value
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=rf"^{UP}\.{suffix}: .*use a whole copy of the checkpoint"):
        load(directory)


@pytest.mark.parametrize("layout", SPARSE)
def test_sparse_outputs_that_are_whole_load(sparse, layout):
    assert len(packed_linears(load(sparse(layout)))) == 2 * 7
