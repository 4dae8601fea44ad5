"""Sources whose tensors and config.json do not belong together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compress_llm.compress_cli.runs.plan import make_plan
from compress_llm.compress_cli.runs.recipe import Recipe
from compress_llm.compress_cli.runs.whole import check_whole
from compress_llm.formats.architectures import architecture
from compress_llm.formats.checkpoint import Checkpoint
from compress_llm.formats.errors import InputError

UP = "model.layers.0.mlp.up_proj"
RECIPE = Recipe(scheme="W8A16")


def changed(directory: Path, without: str | None = None, **config: Any) -> Checkpoint:
    found = Checkpoint.open(directory)
    tensors = {name: info for name, info in found.tensors.items() if name != without}
    return replace(found, tensors=tensors, config={**found.config, **config})


@pytest.mark.parametrize(
    ("without", "config", "sentence"),
    [
        (f"{UP}.weight", {}, f"{UP}.weight: is missing beside model.layers.0.mlp.gate_proj; complete the checkpoint."),
        ("model.embed_tokens.weight", {}, "model.embed_tokens.weight: is missing; complete the checkpoint."),
        (None, {"num_hidden_layers": 3}, "config.json has 3 layers and the checkpoint 2"),
        (None, {"hidden_size": 32}, "and config.json has hidden_size 32; correct config.json, or the checkpoint."),
        (None, {"hidden_size": "64"}, "and config.json has hidden_size '64'"),
        (None, {"vocab_size": 7}, "and config.json has vocab_size 7"),
        ("lm_head.weight", {"tie_word_embeddings": False}, "lm_head.weight: is missing, and config.json has tie_word"),
    ],
)
def test_what_does_not_fit_is_named(tiny_llama: Path, without: str | None, config: dict, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        make_plan(RECIPE, changed(tiny_llama, without, **config))
    assert sentence in str(caught.value)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Gemma3Text", "Phi3", "Mixtral", "Qwen3Moe"])
def test_whole_models_are(kind: str, save_model: Callable[..., Path]) -> None:
    assert make_plan(RECIPE, Checkpoint.open(save_model(kind))).quantized


def test_what_is_not_known_is_not_judged(tiny_llama: Path) -> None:
    lacking = changed(tiny_llama, f"{UP}.weight", model_type="of_tomorrow")
    facts = architecture(lacking.config, {name: info.shape for name, info in lacking.tensors.items()})
    check_whole(lacking, facts, [])
