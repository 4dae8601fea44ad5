"""Models that tests share: tiny, random, saved as any other checkpoint. Never for claims of quality."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which any of our dependencies may do

ASSETS = Path(__file__).resolve().parents[1] / "calibration" / "assets"
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 8192,
    "max_position_embeddings": 128,
}
SaveModel = Callable[..., Path]


@pytest.fixture(scope="session")
def save_model(tmp_path_factory: pytest.TempPathFactory) -> SaveModel:
    """`save_model("llama", name, seed=…, dtype=…, shard="…", **config)` → directory of a random model with the embedded
    tokenizer."""
    import transformers

    def save(
        kind: str = "Llama",
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        max_shard_size: str = "1GB",
        **changes: Any,
    ) -> Path:
        config = getattr(transformers, f"{kind}Config")(**{**SMALL, "pad_token_id": 2, **changes})
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
        directory = tmp_path_factory.mktemp(kind.lower())
        model.save_pretrained(directory, max_shard_size=max_shard_size)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ASSETS / "bookllama-7m" / file, directory / file)
        return directory

    return save


@pytest.fixture(scope="session")
def tiny_llama(save_model: SaveModel) -> Path:
    """A two-block Llama with grouped-query heads and an untied head; never change it in place."""
    return save_model("Llama", tie_word_embeddings=False)
