"""The skeleton against `from_pretrained`: same buffers, same parameters but for their values, and the same logits."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from compress_llm.formats.checkpoint import Checkpoint
from compress_llm.formats.errors import InputError
from compress_llm.kernels.skeleton import empty_model, module_name, read_config

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "mixtral", "qwen3_moe")
IDS = torch.tensor([[1, 5, 9, 33, 90, 2, 7, 7, 61, 4, 80, 13], [3, 2, 1, 0, 44, 95, 12, 70, 6, 6, 28, 50]])


def filled(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The skeleton with every tensor of the checkpoint put where `module_name` says."""
    model = empty_model(read_config(directory), dtype)
    checkpoint = Checkpoint.open(directory)
    for name in checkpoint.tensors:
        path, _, leaf = module_name(model, name).rpartition(".")
        owner = model.get_submodule(path)
        assert leaf in owner._parameters
        setattr(owner, leaf, nn.Parameter(checkpoint.read(name).to(dtype), requires_grad=False))
    model.tie_weights()
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_skeleton_is_from_pretrained_without_the_weights(save, name, dtype):
    expected = AutoModelForCausalLM.from_pretrained(save(name), dtype=dtype)
    model = empty_model(read_config(save(name)), dtype)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not model.training

    buffers, wanted = dict(model.named_buffers()), dict(expected.named_buffers())
    assert buffers.keys() == wanted.keys()
    assert all(buffers[key].dtype == wanted[key].dtype and torch.equal(buffers[key], wanted[key]) for key in wanted)

    shapes = {key: (value.shape, value.dtype) for key, value in model.named_parameters() if ".experts." not in key}
    assert shapes == {k: (v.shape, v.dtype) for k, v in expected.named_parameters() if ".experts." not in k}
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == model.config.tie_word_embeddings


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_filled_skeleton_gives_the_logits_of_from_pretrained(save, name):
    expected = AutoModelForCausalLM.from_pretrained(save(name), dtype=torch.float32)
    model = filled(save(name), torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=1e-5, atol=1e-5)


def test_a_model_of_any_size_takes_neither_memory_nor_random_numbers():
    config = LlamaConfig(
        hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128, vocab_size=128256
    )
    empty_model(LlamaConfig(num_hidden_layers=1), torch.bfloat16)
    state, before = torch.random.get_rng_state(), resident()
    model = empty_model(config, torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) > 400e9
    assert resident() - before < 64 << 20
    assert torch.equal(state, torch.random.get_rng_state())


def resident() -> int:
    """Bytes of anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def test_the_config_is_not_changed(save):
    config = read_config(save("llama"))
    before = config.to_dict()
    empty_model(config, torch.float16, attn_implementation="eager")
    assert config.to_dict() == before
    assert config._attn_implementation != "eager"


def test_threads_do_not_mix_their_dtypes(save):
    config = read_config(save("gemma3_text"))
    dtypes = [torch.float32, torch.bfloat16, torch.float16] * 3
    with ThreadPoolExecutor(len(dtypes)) as pool:
        models = list(pool.map(lambda dtype: empty_model(config, dtype), dtypes))
    assert [model.dtype for model in models] == dtypes
    assert nn.Linear(2, 2).weight.abs().sum() > 0  # initialisation is on again


def test_what_an_architecture_keeps_in_float32_stays_so():
    config = AutoConfig.for_model(
        "ernie4_5_moe",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_num_experts=4,
    )
    model = empty_model(config, torch.bfloat16)
    dtypes = {name: value.dtype for name, value in model.named_parameters()}
    gates = [name for name in dtypes if name.endswith("mlp.gate.weight")]
    assert gates
    assert all(dtypes[name] == torch.float32 for name in gates)
    assert dtypes["model.embed_tokens.weight"] == torch.bfloat16


def test_read_config_drops_the_quantization(save, tmp_path):
    config = json.loads((save("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    assert not hasattr(read_config(tmp_path), "quantization_config")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "config.json: is not valid JSON .*; download or copy the file again"),
        ("[]", "config.json: is not a JSON object"),
        ('{"model_type": "no-such-model"}', "no-such-model.* knows, or correct its config.json"),
        ("{}", "correct its config.json"),
        ('{"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}}', "or --trust-remote-code"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "field 'hidden_size': TypeError: Field"),
    ],
)
def test_a_config_that_is_not_understood_is_an_input_error(tmp_path, content, said):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=said):
        read_config(tmp_path)


def test_a_model_that_cannot_be_built_is_an_input_error(save):
    with pytest.raises(InputError, match="no-such-attention"):
        empty_model(read_config(save("llama")), torch.float32, attn_implementation="no-such-attention")
