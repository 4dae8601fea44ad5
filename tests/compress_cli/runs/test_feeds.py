"""Folding scales into every feed of a whole model changes nothing that the model computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress_llm.calibration.statistics import Stats
from compress_llm.compress_cli.runs.feeds import Heads, live_feeds
from compress_llm.formats.architectures import architecture
from compress_llm.formats.checkpoint import Checkpoint
from compress_llm.quantizers import folding

IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {},
    "Qwen2": {},
    "Qwen3": {},
    "Gemma2": {},
    "Gemma3Text": {},
    "Phi3": {},
    "Mixtral": {"num_local_experts": 2, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def fold_everything(directory: Path) -> int:
    """Fold a random scale into every feed of the model, in place; the number of feeds that had a source."""
    checkpoint = Checkpoint.open(directory)
    tensors = {name: tensor.float() for name, tensor in load_file(directory / "model.safetensors").items()}
    facts = architecture(checkpoint.config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    generator = torch.Generator().manual_seed(1)
    folded = 0
    for number in range(checkpoint.config["num_hidden_layers"]):
        prefix = f"{facts.layers}.{number}."
        block = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        linears = [
            name.removesuffix(".weight") for name, tensor in block.items() if facts.is_linear(name, tuple(tensor.shape))
        ]
        stats = {(name,): Stats(1) for name in linears}
        for feed in live_feeds(facts, prefix, block, dict.fromkeys(linears), stats, Heads.of(checkpoint.config)):
            assert feed.source is not None
            rows = feed.source.weight.shape[0]
            scale = torch.rand(rows, generator=generator) + 0.5
            folding.apply(feed, scale, torch.float32)
            folded += 1
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return folded


def logits(directory: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, experts_implementation="eager")
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("kind", KINDS)
def test_the_folded_model_computes_the_same(kind: str, save_model: Callable[..., Path]) -> None:
    directory = save_model(kind, vocab_size=64, pad_token_id=0, dtype=torch.float32, **KINDS[kind])
    with torch.no_grad():  # biases and norms that are not at their initial zeros and ones
        tensors = load_file(directory / "model.safetensors")
        for name, tensor in tensors.items():
            if tensor.dim() == 1:
                tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    before = logits(directory)
    folded = fold_everything(directory)
    assert folded >= 8
    after = logits(directory)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


def test_every_experts_statistics_are_rescaled_with_the_shared_norm(save_model: Callable[..., Path]) -> None:
    directory = save_model("Mixtral", num_local_experts=2, dtype=torch.float32)
    checkpoint = Checkpoint.open(directory)
    facts = architecture(checkpoint.config, {name: info.shape for name, info in checkpoint.tensors.items()})
    prefix = f"{facts.layers}.0."
    block = {name: checkpoint.read(name) for name in checkpoint.tensors if name.startswith(prefix)}
    experts = [f"{prefix}block_sparse_moe.experts.{number}.w1" for number in range(2)]
    stats = {(name,): Stats(1, abs_max=torch.ones(64)) for name in experts}
    feed = next(live_feeds(facts, prefix, block, dict.fromkeys(experts), stats, Heads.of(checkpoint.config)))
    folding.apply(feed, torch.full((64,), 2.0), torch.float32)
    for seen in stats.values():
        assert seen.abs_max is not None and seen.abs_max.tolist() == [0.5] * 64


def test_value_rows_of_grouped_heads() -> None:
    assert Heads(4, 2, 2).value_rows().tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert Heads.of({"num_attention_heads": 4, "hidden_size": 32}) == Heads(4, 4, 8)
