"""Anonymous memory of `compress quantize` on random Llamas of one width and different depth.

    python benchmarks/memory.py [--layers 12 --layers 24] [--method rtn] [--dir DIR]

Writes each checkpoint a block at a time (never a whole model in memory), runs the command as a process of its own, and
samples RssAnon, which counts what the process itself holds and not the file pages that the system may drop.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
from random_llama import OF_1B, write_llama


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
            parameters = write_llama(model, OF_1B, count)
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
