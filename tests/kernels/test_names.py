"""Names on disk to places in memory, for every tensor that transformers writes."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, LlamaConfig

from compress_llm.formats.errors import InputError
from compress_llm.kernels.names import module_name, names_of
from compress_llm.kernels.skeleton import empty_model, read_config

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "mixtral", "qwen3_moe")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_tensor_has_its_own_place_of_its_shape(save, name):
    model = empty_model(read_config(save(name)), torch.float32)
    places = {key: tuple(value.shape) for key, value in model.state_dict(keep_vars=True).items()}
    with safe_open(save(name) / "model.safetensors", "pt") as file:
        found = {module_name(model, key): tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        assert len(found) == len(file.keys())
    assert found.items() <= places.items()
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert places.keys() - found.keys() == tied


def test_packed_tensors_go_where_the_weight_goes(save):
    model = empty_model(read_config(save("mixtral")), torch.float32)
    for suffix in ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape"):
        disk = f"model.layers.1.block_sparse_moe.experts.3.w1.{suffix}"
        assert module_name(model, disk) == f"model.layers.1.mlp.experts.3.w1.{suffix}"
    assert module_name(model, "model.layers.0.block_sparse_moe.gate.weight") == "model.layers.0.mlp.gate.weight"
    assert module_name(model, "lm_head.weight_packed") == "lm_head.weight_packed"


def test_names_of_the_model_itself_are_their_own_places(save):
    model = empty_model(read_config(save("qwen3_moe")), torch.float32)
    for name in model.state_dict(keep_vars=True):
        assert module_name(model, name) == name


def test_a_checkpoint_of_the_body_alone_gets_its_prefix(save):
    model = empty_model(read_config(save("llama")), torch.float32)
    assert module_name(model, "layers.1.mlp.up_proj.weight") == "model.layers.1.mlp.up_proj.weight"
    assert module_name(model, "norm.weight") == "model.norm.weight"


@pytest.mark.parametrize("name", ["model.layers.7.mlp.up_proj.weight", "visual.patch.weight", "weight", "model"])
def test_what_has_no_place_is_an_input_error(save, name):
    model = empty_model(read_config(save("llama")), torch.float32)
    assert names_of(model).path(name) is None
    with pytest.raises(InputError, match="no place in a LlamaForCausalLM"):
        module_name(model, name)


def test_experts_that_stay_fused_have_no_place_for_single_projections():
    config = AutoConfig.for_model(
        "gpt_oss", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_local_experts=2, vocab_size=16
    )
    model = empty_model(config, torch.float32)
    assert names_of(model).path("model.layers.0.mlp.experts.0.gate_proj.weight") is None
    fused = "model.layers.0.mlp.experts.gate_up_proj"
    assert module_name(model, fused) == fused


def test_tables_of_old_checkpoints_are_ignored(save):
    names = names_of(empty_model(read_config(save("llama")), torch.float32))
    assert names.ignored("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not names.ignored("model.layers.0.self_attn.q_proj.weight")


def test_names_are_worked_out_once_a_model():
    model = empty_model(LlamaConfig(num_hidden_layers=1), torch.float32)
    assert names_of(model) is names_of(model)
