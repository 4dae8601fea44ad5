"""Tiny random models of every architecture that is promised to work, saved as transformers saves them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from compress_llm.formats.packings import packing
from compress_llm.formats.quantization_config import build
from compress_llm.formats.rounded import QParams, Rounded, round_to_grid
from compress_llm.formats.scheme import Scheme

BASE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2}
ARCHITECTURES: dict[str, dict[str, object]] = {
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "mistral": {"sliding_window": 8},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8, "tie_word_embeddings": True},
    "phi3": {},
    "mixtral": {**EXPERTS, "num_local_experts": 4},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 16, "decoder_sparse_step": 1, "head_dim": 8},
}
Save = Callable[[str], Path]
Pack = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="session")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """`save(architecture)`: the directory of a tiny model in bfloat16, made once."""
    made: dict[str, Path] = {}

    def saved(name: str) -> Path:
        if name not in made:
            config = AutoConfig.for_model(name, **{**BASE, **ARCHITECTURES[name]})
            config.dtype = torch.bfloat16
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            for parameter in model.parameters():
                parameter.data.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name])
        return made[name]

    return saved


@pytest.fixture
def pack(save: Save, tmp_path: Path) -> Pack:
    """`pack(architecture, scheme, ...)`: a packed directory, and a dense one that holds its decoded weights."""

    def packed(
        name: str, scheme: Scheme, suffix: str = "_proj.weight", head: Scheme | None = None
    ) -> tuple[Path, Path]:
        source = save(name)
        config = json.loads((source / "config.json").read_text())
        tensors = load_file(source / "model.safetensors")
        chosen = {key: scheme for key in tensors if key.endswith((suffix, "w1.weight", "w2.weight", "w3.weight"))}
        if head is not None:
            embedding = tensors["model.embed_tokens.weight"]
            tensors.setdefault("lm_head.weight", embedding.clone())
            chosen["lm_head.weight"] = head
            config["tie_word_embeddings"] = False
        dense, small = dict(tensors), dict(tensors)
        for key, row in chosen.items():
            rounded = nearest(small.pop(key), row)
            dense[key] = rounded.dequantize()
            stem = key.removesuffix(".weight")
            small.update({f"{stem}.{part}": tensor for part, tensor in packing(row).pack(rounded).items()})
        schemes = {key.removesuffix(".weight"): row for key, row in chosen.items()}
        linears = [key.removesuffix(".weight") for key, value in tensors.items() if value.ndim == 2]
        ignored = [key for key in linears if key not in schemes and "embed" not in key]
        write(tmp_path / "dense", source, dense, config)
        write(tmp_path / "packed", source, small, {**config, "quantization_config": build(schemes, ignored)})
        return tmp_path / "packed", tmp_path / "dense"

    return packed


def nearest(weight: Tensor, scheme: Scheme) -> Rounded:
    """Minmax round-to-nearest with bfloat16 scales and odd zero points where there are any."""
    groups = weight.float().reshape(weight.shape[0], scheme.groups(weight.shape[1]), -1)
    scale = (groups.abs().amax(-1) / scheme.grid.reach).to(torch.bfloat16)
    zero = None if scheme.symmetric else torch.randint(-2, 3, scale.shape, dtype=torch.int8)
    rounded = round_to_grid(weight.float(), scheme, QParams(scale, zero))
    if scheme.activation is None or scheme.activation.dynamic:
        return rounded
    return Rounded(scheme, rounded.codes, rounded.params, torch.tensor([0.05], dtype=torch.bfloat16))


def write(directory: Path, source: Path, tensors: Mapping[str, Tensor], config: Mapping[str, object]) -> None:
    """A model directory like `source` with other tensors and another config.json."""
    directory.mkdir()
    contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_bytes((source / "generation_config.json").read_bytes())
