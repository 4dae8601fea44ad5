"""The facts of each architecture, held against the models that transformers builds and saves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from compress_llm.formats.architectures import ARCHITECTURES, Architecture, architecture

KINDS = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3Text",
    "phi3": "Phi3",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
}
EXPERTS = {
    "mixtral": {"num_local_experts": 2},
    "qwen3_moe": {"num_experts": 2, "moe_intermediate_size": 32, "num_experts_per_tok": 1},
}


def saved(kind: str, save_model: Callable[..., Path]) -> dict[str, tuple[int, ...]]:
    directory = save_model(KINDS[kind], vocab_size=64, pad_token_id=0, **EXPERTS.get(kind, {}))
    with safe_open(directory / "model.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("kind", KINDS)
def test_every_linear_and_producer_of_a_saved_model_is_named(kind: str, save_model: Callable[..., Path]) -> None:
    shapes = saved(kind, save_model)
    facts = architecture({"model_type": kind}, shapes)
    assert facts.known
    inner = {place[1] for name in shapes if (place := facts.split(name)) and place[0] == 0}
    linears = {name for name in inner if facts.is_linear(f"model.layers.0.{name}", (4, 4))}
    left = {name for name in inner if not name.endswith(".bias")} - linears
    assert all("norm" in name or name.endswith(".gate.weight") for name in left)
    for feed in facts.feeds:
        for name in (feed.source, *feed.targets, *feed.also):
            assert f"{name.replace('*', '1')}.weight" in inner


@pytest.mark.parametrize("facts", ARCHITECTURES.values(), ids=lambda facts: facts.name)
def test_feed_shapes_fit_and_fused_groups_are_linears(facts: Architecture) -> None:
    for group in facts.fused:
        assert all(name in facts.linears for name in group)
    for feed in facts.feeds:
        assert all(target in facts.linears for target in feed.targets)


def test_fused_partners_keep_the_expert_number() -> None:
    facts = ARCHITECTURES["mixtral"]
    assert facts.fused_with("block_sparse_moe.experts.7.w3") == (
        "block_sparse_moe.experts.7.w1",
        "block_sparse_moe.experts.7.w3",
    )
    assert facts.fused_with("self_attn.o_proj") == ("self_attn.o_proj",)


def test_unknown_architecture_is_read_from_names_and_shapes() -> None:
    shapes = {
        "transformer.h.0.attn.c_attn.weight": (96, 32),
        "transformer.h.0.ln_1_norm.weight": (32,),
        "transformer.h.1.attn.c_attn.weight": (96, 32),
        "transformer.wte.weight": (64, 32),
    }
    facts = architecture({"model_type": "novel"}, shapes)
    assert not facts.known
    assert facts.layers == "transformer.h"
    assert facts.linears == ("attn.c_attn",)
    assert facts.feeds == ()


def test_names_outside_the_blocks_have_no_place() -> None:
    facts = ARCHITECTURES["llama"]
    assert facts.split("model.embed_tokens.weight") is None
    assert facts.split("model.layers.12.mlp.up_proj.weight") == (12, "mlp.up_proj.weight")
    assert not facts.is_linear("model.layers.0.input_layernorm.weight", torch.Size((8,)))


def test_fused_linears_by_whole_names():
    llama = ARCHITECTURES["llama"]
    stem = "model.layers.3.self_attn."
    assert llama.fused_names(f"{stem}k_proj") == (f"{stem}q_proj", f"{stem}k_proj", f"{stem}v_proj")
    assert llama.fused_names(f"{stem}o_proj") == (f"{stem}o_proj",)
    assert llama.fused_names("lm_head") == ("lm_head",)
    moe = "model.layers.0.block_sparse_moe.experts.7."
    assert ARCHITECTURES["mixtral"].fused_names(f"{moe}w3") == (f"{moe}w1", f"{moe}w3")
