"""Random Llamas for the other benchmarks: a checkpoint of any size and depth, written a block at a time, or packed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from compress_llm.compress_cli.runs import bench_kernels, bench_sparse
from compress_llm.formats.packings import packing
from compress_llm.formats.pruned import Pruned
from compress_llm.formats.quantization_config import build
from compress_llm.formats.scheme import Scheme

NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True)
class Size:
    """What a Llama's blocks look like; `key_value` is the number of key and value heads."""

    width: int
    inner: int
    heads: int
    key_value: int
    vocabulary: int

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of a block's linears by name."""
        narrow = self.width * self.key_value // self.heads
        return {
            "self_attn.q_proj": (self.width, self.width),
            "self_attn.k_proj": (narrow, self.width),
            "self_attn.v_proj": (narrow, self.width),
            "self_attn.o_proj": (self.width, self.width),
            "mlp.gate_proj": (self.inner, self.width),
            "mlp.up_proj": (self.inner, self.width),
            "mlp.down_proj": (self.width, self.inner),
        }

    def config(self, layers: int) -> dict[str, object]:
        """config.json of a model with so many blocks."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value,
            "num_hidden_layers": layers,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }


OF_8B = Size(width=4096, inner=14336, heads=32, key_value=8, vocabulary=128256)
OF_1B = Size(width=2048, inner=5632, heads=32, key_value=4, vocabulary=32000)


def write_llama(
    directory: Path, size: Size, layers: int, packed: Scheme | None = None, device: torch.device | str = "cpu"
) -> int:
    """Write a random checkpoint, its blocks' linears of scheme `packed`, or dense; returns the number of weights.

    Real numbers are in bfloat16; the tensors of one block are held at a time.
    """
    directory.mkdir(parents=True)
    generator = torch.Generator(device).manual_seed(layers)

    def dense(shapes: dict[str, tuple[int, int]]) -> dict[str, Tensor]:
        return {
            f"{name}.weight": (torch.randn(shape, generator=generator, device=device) * 0.02).bfloat16()
            for name, shape in shapes.items()
        }

    def norms(*names: str) -> dict[str, Tensor]:
        return {f"{name}.weight": torch.ones(size.width, dtype=torch.bfloat16) for name in names}

    places: dict[str, str] = {}
    table = (size.vocabulary, size.width)
    ends = {"model.embed_tokens": table, "lm_head": table}
    _save(directory, "ends", {**dense(ends), **norms("model.norm")}, places)
    for layer in range(layers):
        block = f"model.layers.{layer}."
        shapes = {block + name: shape for name, shape in size.linears.items()}
        if packed is None:
            tensors = dense(shapes)
        else:
            tensors = {
                f"{name}.{suffix}": tensor
                for name, shape in shapes.items()
                for suffix, tensor in _packed(packed, shape, torch.device(device)).items()
            }
        _save(directory, f"block-{layer}", {**tensors, **norms(*(block + norm for norm in NORMS))}, places)
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config = size.config(layers)
    if packed is not None:
        names = [f"model.layers.{layer}.{name}" for layer in range(layers) for name in size.linears]
        config["quantization_config"] = build(dict.fromkeys(names, packed), ["lm_head"])
    (directory / "config.json").write_text(json.dumps(config))
    block_weights = sum(rows * columns for rows, columns in size.linears.values()) + len(NORMS) * size.width
    return 2 * size.vocabulary * size.width + size.width + layers * block_weights


@lru_cache(maxsize=8)
def _packed(scheme: Scheme, shape: tuple[int, int], device: torch.device) -> dict[str, Tensor]:
    """Tensors by suffix of a random linear; one of each shape serves all blocks."""
    if scheme.sparsity is None or scheme.rounds:
        return bench_kernels.random_weight(scheme, shape, torch.bfloat16, device)
    weight = bench_sparse.random_weight(shape, device, torch.bfloat16, kept=1 - scheme.sparsity.ratio)
    return packing(scheme).pack(Pruned(scheme, weight))


def _save(directory: Path, stem: str, tensors: dict[str, Tensor], places: dict[str, str]) -> None:
    file = f"model-{stem}.safetensors"
    ready = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(ready, directory / file, {"format": "pt"})
    places.update(dict.fromkeys(tensors, file))
