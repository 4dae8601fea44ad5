"""Decoding with an 8B-shaped Llama of random weights, W4A16 against bfloat16: speed, and memory to load.

    python benchmarks/decode.py [--scheme W4A16] [--layers 32] [--dir DIR]

Writes both checkpoints a block at a time (22 GB at full depth), loads them as anybody would, and times single tokens.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import click
import torch
from safetensors.torch import save_file
from torch import Tensor

from compress_llm.compress_cli.runs.bench_decode import bench_decoding
from compress_llm.compress_cli.runs.bench_kernels import random_weight
from compress_llm.compress_cli.runs.device import pick_device
from compress_llm.formats.quantization_config import build
from compress_llm.formats.scheme import Scheme, scheme

WIDTH, INNER, HEADS, KEY_VALUE, VOCABULARY = 4096, 14336, 32, 8, 128256
NARROW = WIDTH * KEY_VALUE // HEADS
LINEARS = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (NARROW, WIDTH),
    "self_attn.v_proj": (NARROW, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (INNER, WIDTH),
    "mlp.up_proj": (INNER, WIDTH),
    "mlp.down_proj": (WIDTH, INNER),
}
NORMS = ("input_layernorm", "post_attention_layernorm")


def write_model(directory: Path, layers: int, packed: Scheme | None, device: torch.device) -> None:
    """A random checkpoint, its blocks' linears of scheme `packed`, or dense."""
    directory.mkdir(parents=True)
    places: dict[str, str] = {}
    ends = {"model.embed_tokens": (VOCABULARY, WIDTH), "lm_head": (VOCABULARY, WIDTH)}
    _save(directory, "ends", {**_dense(ends, device), "model.norm.weight": torch.ones(WIDTH)}, places)
    for layer in range(layers):
        names = {f"model.layers.{layer}.{name}": size for name, size in LINEARS.items()}
        tensors = _dense(names, device) if packed is None else {}
        if packed is not None:
            for name, size in names.items():
                stored = random_weight(packed, size, torch.bfloat16, device)
                tensors.update({f"{name}.{suffix}": tensor for suffix, tensor in stored.items()})
        tensors.update({f"model.layers.{layer}.{norm}.weight": torch.ones(WIDTH) for norm in NORMS})
        _save(directory, f"block-{layer}", tensors, places)
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE,
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    if packed is not None:
        names = [f"model.layers.{layer}.{name}" for layer in range(layers) for name in LINEARS]
        config["quantization_config"] = build(dict.fromkeys(names, packed), ["lm_head"])
    (directory / "config.json").write_text(json.dumps(config))


def _dense(sizes: dict[str, tuple[int, int]], device: torch.device) -> dict[str, Tensor]:
    return {f"{name}.weight": torch.randn(size, device=device) * 0.02 for name, size in sizes.items()}


def _save(directory: Path, stem: str, tensors: dict[str, Tensor], places: dict[str, str]) -> None:
    """One shard; real numbers in bfloat16."""
    file = f"model-{stem}.safetensors"
    ready = {name: (tensor.bfloat16() if tensor.is_floating_point() else tensor) for name, tensor in tensors.items()}
    save_file({name: tensor.cpu().contiguous() for name, tensor in ready.items()}, directory / file, {"format": "pt"})
    places.update(dict.fromkeys(tensors, file))


@click.command()
@click.option("--scheme", "name", default="W4A16", show_default=True)
@click.option("--layers", default=32, show_default=True)
@click.option("--device", default="auto", show_default=True)
@click.option("--dir", "place", type=click.Path(path_type=Path), help="Where to write; a temporary directory if unset.")
def main(name: str, layers: int, device: str, place: Path | None) -> None:
    """Print both speeds, their ratio, and the memory that loading took."""
    where, root = pick_device(device), Path(tempfile.mkdtemp(dir=place))
    try:
        write_model(root / "dense", layers, None, where)
        write_model(root / "packed", layers, scheme(name), where)
        found = bench_decoding(str(root / "packed"), str(root / "dense"), where)
    finally:
        shutil.rmtree(root)
    for speed in (found.packed, found.dense):
        if speed is not None:
            peak = "" if speed.peak_bytes is None else f", {speed.peak_bytes / speed.stored_bytes:.3f} of it to load"
            print(f"{Path(speed.model).name}: {speed.ms_per_token:.3f} ms a token, {speed.stored_bytes:,} bytes{peak}")
    print(f"{found.speedup:.2f} times as fast")


if __name__ == "__main__":
    main()
