"""What a calibrated method costs on a CPU, as a multiple of one plain forward pass over the same tokens.

    python benchmarks/method_cost.py MODEL --calibration FILE [--method gptq --method awq] [--num-samples 64]

The pass (float32, hidden states only, no logits) is timed before and after the methods in the same process, because a
shared machine changes its speed; the multiple is taken of their mean.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import click
import torch

import compress_llm
from compress_llm.calibration.sources import read_source
from compress_llm.calibration.tokenizer import load_tokenizer
from compress_llm.calibration.windows import Windows, calibration_windows
from compress_llm.compress_cli.runs.recipe import Recipe

BATCH = 8
SHARE = 4


def forward_seconds(model: str, windows: Windows) -> float:
    """Seconds of one pass of all windows through the model's body, from a pass of every `SHARE`th."""
    network = compress_llm.load(model, dtype=torch.float32)
    body = network.get_decoder()
    with torch.no_grad():
        body(windows.ids[:1])
        begun = time.perf_counter()
        for batch in windows.ids[::SHARE].split(BATCH):
            body(batch, use_cache=False)
    return (time.perf_counter() - begun) * SHARE


@click.command()
@click.argument("model")
@click.option("--calibration", required=True)
@click.option("--method", "methods", multiple=True, default=("gptq", "awq"), show_default=True)
@click.option("--group-size", default=64, show_default=True)
@click.option("--num-samples", default=64, show_default=True)
@click.option("--seq-len", default=512, show_default=True)
def main(
    model: str, calibration: str, methods: tuple[str, ...], group_size: int, num_samples: int, seq_len: int
) -> None:
    """Print seconds and multiples."""
    windows = calibration_windows(read_source(calibration), load_tokenizer(Path(model)), num_samples, seq_len, seed=0)
    root = Path(tempfile.mkdtemp())
    passes = [forward_seconds(model, windows)]
    seconds: dict[str, float] = {}
    for method in methods:
        recipe = Recipe(
            method=method,
            group_size=group_size,
            dataset=calibration,
            num_samples=num_samples,
            seq_len=seq_len,
            batch_size=BATCH,
            dtype="float32",
        )
        begun = time.perf_counter()
        compress_llm.quantize(model, root / "out", recipe, device="cpu", overwrite=True)
        seconds[method] = time.perf_counter() - begun
        passes.append(forward_seconds(model, windows))
    mean = sum(passes) / len(passes)
    click.echo(f"forward pass: {', '.join(f'{one:.1f}' for one in passes)} s with {torch.get_num_threads()} threads")
    for method, spent in seconds.items():
        click.echo(f"{method}: {spent:.1f} s, {spent / mean:.2f} forward passes")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
