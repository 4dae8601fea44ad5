"""Separate experts against the fused module of transformers, with the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from compress_llm.kernels.experts import Experts, separate_experts

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}
NAMES = {"mixtral": ("w1", "w3", "w2"), "qwen3_moe": ("gate_proj", "up_proj", "down_proj")}


def model_of(kind: str, **changes: object) -> nn.Module:
    config = AutoConfig.for_model(kind, **{**SIZES, **changes})
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", NAMES)
def test_separate_experts_compute_what_the_fused_module_computes(kind):
    torch.manual_seed(0)
    model = model_of(kind, num_local_experts=5, num_experts=5)
    fused = model.model.layers[0].mlp.experts
    separate_experts(model)
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, Experts)
    gate, up, down = NAMES[kind]
    for number, expert in enumerate(experts):
        linears = [name for name, child in expert.named_children() if isinstance(child, nn.Linear)]
        assert linears == [gate, up, down]
        weights = (*fused.gate_up_proj[number].chunk(2), fused.down_proj[number])
        for name, weight in zip((gate, up, down), weights, strict=True):
            linear = expert.get_submodule(name)
            assert linear.weight.is_meta
            assert linear.weight.shape == weight.shape == (linear.out_features, linear.in_features)
            linear.weight = nn.Parameter(weight)

    x = torch.randn(11, 16)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(11)])  # the fifth expert is not chosen
    weights = torch.rand(11, 2)
    with torch.no_grad():
        torch.testing.assert_close(experts(x, index, weights), fused(x, index, weights), rtol=1e-5, atol=1e-6)


def test_an_expert_without_tokens_is_not_run():
    model = model_of("mixtral", num_local_experts=3)
    separate_experts(model)
    experts = model.model.layers[0].mlp.experts.to_empty(device="cpu")
    called: list[int] = []
    for number, expert in enumerate(experts):
        expert.register_forward_hook(lambda *_, number=number: called.append(number))
    experts(torch.zeros(2, 16), torch.tensor([[2, 0], [2, 0]]), torch.ones(2, 2))
    assert called == [0, 2]


def test_the_result_has_the_dtype_of_the_states():
    model = model_of("mixtral", num_local_experts=3)
    separate_experts(model)
    experts = model.model.layers[0].mlp.experts.to_empty(device="cpu").to(torch.bfloat16)
    result = experts(torch.zeros(2, 16, dtype=torch.bfloat16), torch.tensor([[0, 1], [1, 2]]), torch.ones(2, 2))
    assert result.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_what_is_not_stored_separately_is_left_alone(kind):
    changes = {"num_local_experts": 4, "head_dim": 8} if kind == "gpt_oss" else {}
    model = model_of(kind, **changes)
    before = [type(module) for module in model.modules()]
    separate_experts(model)
    assert [type(module) for module in model.modules()] == before
