"""Decoding with an 8B-shaped Llama of random weights, packed against bfloat16: speed, and memory to load.

    python benchmarks/decode.py [--scheme W4A16 …] [--layers 32] [--dir DIR]

Writes the checkpoints a block at a time (16 GB of bfloat16 and one packed one at full depth), loads them as anybody
would, and times single tokens.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import click
from random_llama import OF_8B, write_llama

from compress_llm.compress_cli.runs.bench_decode import Decoding, bench_decoding
from compress_llm.compress_cli.runs.device import pick_device
from compress_llm.formats.scheme import scheme


@click.command()
@click.option("--scheme", "names", multiple=True, default=["W4A16"], show_default=True)
@click.option("--layers", default=32, show_default=True)
@click.option("--device", default="auto", show_default=True)
@click.option("--dir", "place", type=click.Path(path_type=Path), help="Where to write; a temporary directory if unset.")
def main(names: tuple[str, ...], layers: int, device: str, place: Path | None) -> None:
    """Print for each scheme both speeds, their ratio, and the memory that loading took."""
    where, root = pick_device(device), Path(tempfile.mkdtemp(dir=place))
    try:
        write_llama(root / "dense", OF_8B, layers, device=where)
        for name in names:
            write_llama(root / name, OF_8B, layers, scheme(name), where)
            _print(bench_decoding(str(root / name), str(root / "dense"), where))
            shutil.rmtree(root / name)
    finally:
        shutil.rmtree(root)


def _print(found: Decoding) -> None:
    for speed in (found.packed, found.dense):
        if speed is not None:
            peak = "" if speed.peak_bytes is None else f", {speed.peak_bytes / speed.stored_bytes:.3f} of it to load"
            print(f"{Path(speed.model).name}: {speed.ms_per_token:.3f} ms a token, {speed.stored_bytes:,} bytes{peak}")
    print(f"{found.speedup:.2f} times as fast", flush=True)


if __name__ == "__main__":
    main()
