"""Anonymous memory of `compress quantize` on random Llamas of one width and different depth.

    python benchmarks/memory.py [--layers 12 --layers 24] [--method rtn] [--dir DIR]

Writes each checkpoint a tensor at a time (never a whole model in memory), runs the command as a process of its own, and
samples RssAnon, which counts what the process itself holds and not the file pages that the system may drop.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import torch
from safetensors.torch import save_file

WIDTH, INNER, HEADS, KEY_VALUE, VOCABULARY = 2048, 5632, 32, 4, 32000


def write_model(directory: Path, layers: int) -> int:
    """A random Llama checkpoint of TinyLlama's width, a shard a block; returns the number of parameters."""
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(layers)
    key_value = WIDTH * KEY_VALUE // HEADS
    shapes = {
        "self_attn.q_proj": (WIDTH, WIDTH),
        "self_attn.k_proj": (key_value, WIDTH),
        "self_attn.v_proj": (key_value, WIDTH),
        "self_attn.o_proj": (WIDTH, WIDTH),
        "mlp.gate_proj": (INNER, WIDTH),
        "mlp.up_proj": (INNER, WIDTH),
        "mlp.down_proj": (WIDTH, INNER),
    }
    groups = [{"model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,)}]
    groups.append({"lm_head.weight": (VOCABULARY, WIDTH)})
    for layer in range(layers):
        block = {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        groups.append({**block, **{f"model.layers.{layer}.{norm}.weight": (WIDTH,) for norm in norms}})
    places, parameters = {}, 0
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = {
            name: (torch.randn(shape, generator=generator) * 0.02 + ("norm" in name)).to(torch.bfloat16)
            for name, shape in group.items()
        }
        save_file(tensors, directory / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(tensors, file))
        parameters += sum(tensor.numel() for tensor in tensors.values())
    index = {"metadata": {"total_size": 2 * parameters}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE,
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config))
    return parameters


def peak_anonymous(command: list[str]) -> tuple[int, float]:
    """Largest RssAnon (bytes) of the command while it runs, sampled every 20 ms, and the seconds it took."""
    begun = time.monotonic()
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    status, peak = Path(f"/proc/{process.pid}/status"), 0
    while process.poll() is None:
        for line in status.read_text().splitlines():
            if line.startswith("RssAnon:"):
                peak = max(peak, int(line.split()[1]) << 10)
        time.sleep(0.02)
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    return peak, time.monotonic() - begun


@click.command()
@click.option("--layers", multiple=True, type=int, default=(12, 24), show_default=True)
@click.option("--scheme", default="W4A16", show_default=True)
@click.option("--scale-rule", default="mse", show_default=True)
@click.option("--dir", "place", type=click.Path(path_type=Path), help="Where the checkpoints are made, and removed.")
def main(layers: tuple[int, ...], scheme: str, scale_rule: str, place: Path | None) -> None:
    """Print parameters, peak anonymous memory and time for each depth."""
    root = Path(tempfile.mkdtemp(dir=place))
    try:
        for count in layers:
            model = root / f"llama-{count}"
            parameters = write_model(model, count)
            command = [sys.executable, "-m", "compress_llm", "quantize", str(model), "-o", str(root / "out")]
            peak, seconds = peak_anonymous([*command, "--scheme", scheme, "--scale-rule", scale_rule, "--overwrite"])
            click.echo(
                f"{count} layers, {parameters / 1e9:.3f} B parameters: RssAnon {peak / 1e9:.3f} GB, {seconds:.0f} s"
            )
            shutil.rmtree(model)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
