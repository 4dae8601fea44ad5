"""Blocks of an 8B-shaped Llama through the calibrated methods on a GPU: time a block, peak memory, and CPU against GPU.

    python benchmarks/cuda_blocks.py [--blocks 2] [--method gptq --method awq]

The weights are random, so this says how long the work takes and nothing about quality. The second table runs one
small model on both devices with the same recipe: the share of equal codes, and the largest change of an output error.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import torch
from safetensors.torch import load_file, save_file

import compress_llm
from compress_llm.calibration.embedded import model_path
from compress_llm.compress_cli.runs.recipe import Recipe

WIDTH, INNER, HEADS, KEY_VALUE, VOCABULARY = 4096, 14336, 32, 8, 8192


def write_model(directory: Path, blocks: int) -> None:
    """A random checkpoint of Llama-3-8B's block shapes with the embedded tokenizer."""
    shutil.copytree(model_path(), directory, ignore=shutil.ignore_patterns("*.safetensors", "*.md", "LICENSE*"))
    config = json.loads((directory / "config.json").read_text())
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": HEADS, "head_dim": 128}
    sizes |= {"num_key_value_heads": KEY_VALUE, "num_hidden_layers": blocks, "vocab_size": VOCABULARY}
    (directory / "config.json").write_text(json.dumps({**config, **sizes}))
    rows = KEY_VALUE * 128
    shapes = {"q_proj": (WIDTH, WIDTH), "k_proj": (rows, WIDTH), "v_proj": (rows, WIDTH), "o_proj": (WIDTH, WIDTH)}
    inner = {"gate_proj": (INNER, WIDTH), "up_proj": (INNER, WIDTH), "down_proj": (WIDTH, INNER)}
    tensors = {"model.embed_tokens.weight": torch.randn(VOCABULARY, WIDTH), "model.norm.weight": torch.ones(WIDTH)}
    for block in range(blocks):
        for part, group in (("self_attn", shapes), ("mlp", inner)):
            for name, shape in group.items():
                tensors[f"model.layers.{block}.{part}.{name}.weight"] = torch.randn(shape) * 0.02
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{block}.{norm}.weight"] = torch.ones(WIDTH)
    stored = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})


class Clock:
    """A `Track` that notes the seconds of each unit."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, items: Iterable, label: str, total: int) -> Iterator:
        """Yield the items; those of the quantising loop are timed."""
        del total
        for item in items:
            begun = time.perf_counter()
            yield item
            if label == "quantising":
                torch.cuda.synchronize()
                self.seconds.append(time.perf_counter() - begun)


def compare(root: Path, method: str) -> str:
    """One method on the embedded model, on the CPU and on the GPU in float32."""
    recipe = Recipe(method=method, num_samples=16, dtype="float32", group_size=64)
    reports = [compress_llm.quantize(None, root / device, recipe, device=device) for device in ("cpu", "cuda")]
    codes = [load_file(root / device / "model.safetensors") for device in ("cpu", "cuda")]
    equal = total = 0
    for name in codes[0]:
        if name.endswith("weight_packed"):
            nibbles = [torch.stack([part[name] >> shift & 15 for shift in range(0, 32, 4)]) for part in codes]
            equal, total = equal + int((nibbles[0] == nibbles[1]).sum()), total + nibbles[0].numel()
    rows = zip(reports[0].layers, reports[1].layers, strict=True)
    errors = [(a.output_error or a.weight_error, b.output_error or b.weight_error) for a, b in rows]
    worst = max(abs(first / second - 1) for first, second in errors)
    return f"| {method} | {100 * equal / total:.2f} % | {100 * worst:.2f} % |"


@click.command()
@click.option("--blocks", default=2, show_default=True)
@click.option("--method", "methods", multiple=True, default=("gptq", "awq", "awq,gptq"), show_default=True)
@click.option("--num-samples", default=128, show_default=True)
@click.option("--seq-len", default=512, show_default=True)
def main(blocks: int, methods: tuple[str, ...], num_samples: int, seq_len: int) -> None:
    """Print both tables."""
    root = Path(tempfile.mkdtemp())
    write_model(root / "model", blocks)
    click.echo("| method, W4A16 g128 | s a block | peak GPU memory | peak host memory |\n|---|---|---|---|")
    for method in methods:
        clock = Clock()
        torch.cuda.reset_peak_memory_stats()
        recipe = Recipe(method=method, num_samples=num_samples, seq_len=seq_len, dataset="embedded")
        report = compress_llm.quantize(
            str(root / "model"), root / "out", recipe, device="cuda", overwrite=True, track=clock
        )
        gpu, host = report.run["peak_device_memory_bytes"] / 1e9, report.run["peak_memory_bytes"] / 1e9
        click.echo(
            f"| {method} | {', '.join(f'{s:.1f}' for s in clock.seconds[1:-1])} | {gpu:.2f} GB | {host:.2f} GB |"
        )
    click.echo("\n| method, embedded model g64 | equal codes | largest change of an output error |\n|---|---|---|")
    for number, method in enumerate(("rtn", *methods)):
        click.echo(compare(root / str(number), method))
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
