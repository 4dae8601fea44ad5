"""Packed products against dense bfloat16 ones on a GPU, and against gemlite where it is installed: a Markdown table.

    python benchmarks/products.py [--scheme NVFP4A16 …] [--shape 14336x4096 …] [--tokens 1 …]

Everything is measured in one process: CUDA graphs over weights that take turns, replays alternating with those of the
dense product, medians. Every product is checked against float64 and for bit-equal repetition.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import click
import torch
from torch.nn import functional

from compress_llm.compress_cli.runs.bench import CPU_SHAPES, CPU_TOKENS, GPU_SHAPES, GPU_TOKENS, shape
from compress_llm.compress_cli.runs.bench_kernels import Weights, cell
from compress_llm.compress_cli.runs.device import pick_device
from compress_llm.compress_cli.runs.timing import interleaved, limits
from compress_llm.formats.scheme import scheme
from compress_llm.kernels.reference import packed_codes

SCHEMES = (
    *("W4A16", "W8A8", "NVFP4A16", "MXFP4A16", "MXFP8A16", "FP8_DYNAMIC"),
    *("W8A8_BLOCK", "FP8_BLOCK", "W4A8", "W4AFP8"),
)

GEMLITE = ("W4A16", "W8A8", "MXFP4A16")
"""Schemes that gemlite has a product for which runs on these GPUs."""


def gemlite_calls(weights: Weights, x: torch.Tensor) -> list[Callable[[], object]]:
    """Calls of gemlite's linear for the same weights, each a copy of its own."""
    from gemlite.helper import (  # pyright: ignore[reportMissingImports]
        A16W4_HQQ_INT,
        A16W4_MXFP,
        A8W8_int8_dynamic,
    )

    def layer() -> Callable[[torch.Tensor], object]:
        if weights.scheme.name == "MXFP4A16":
            maker = A16W4_MXFP(device="cuda:0", dtype=weights.dtype)
            return maker.from_packed_weights(
                *(weights.stored.tensors[name] for name in ("weight_packed", "weight_scale"))
            )
        stored = packed_codes(weights.stored.tensors, weights.scheme, weights.shape)
        if weights.scheme.activation is not None:
            return A8W8_int8_dynamic(device="cuda:0", dtype=weights.dtype).from_weights(weights.dense[0])
        codes = (stored.codes + 8).to(torch.uint8)
        maker = A16W4_HQQ_INT(device="cuda:0", dtype=weights.dtype)
        return maker.from_weights(codes, stored.scale, torch.full_like(stored.scale, 8))

    return [partial(layer(), x) for _ in weights.arranged]


def gemlite_us(weights: Weights, tokens: int) -> float:
    """Microseconds of gemlite's product, its replays alternating with those of the dense one."""
    x = torch.randn(tokens, weights.shape[1], device=weights.device, dtype=weights.dtype)
    dense = [lambda dense=dense: functional.linear(x, dense) for dense in weights.dense]
    return interleaved({"gemlite": gemlite_calls(weights, x), "dense": dense}, weights.device)["gemlite"].us


@click.command()
@click.option("--scheme", "names", multiple=True, default=SCHEMES)
@click.option("--shape", "shapes", multiple=True, metavar="OUTxIN")
@click.option("--tokens", multiple=True, type=int)
@click.option("--device", default="auto")
def main(names: tuple[str, ...], shapes: tuple[str, ...], tokens: tuple[int, ...], device: str) -> None:
    """Print the table."""
    place = pick_device(device)
    on_gpu = place.type == "cuda"
    can, rival = limits(place), on_gpu and find_spec("gemlite") is not None
    print(f"{can.bytes_per_second / 1e12:.2f} TB/s copied, {can.operations_per_second / 1e12:.0f} T operations/s\n")
    print("| scheme | weight | tokens | kernel | µs | waiting | dense µs | × | floor | gemlite | error / dense |")
    print("|---|---|---:|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in names:
        for size in shapes or (GPU_SHAPES if on_gpu else CPU_SHAPES):
            weights = Weights(scheme(name), shape(size), place, torch.bfloat16)
            for count in tokens or (GPU_TOKENS if on_gpu else CPU_TOKENS):
                row = cell(weights, count, can)
                waiting = "" if row.without_early_start_us is None else f"{row.without_early_start_us:.1f}"
                other = f"{gemlite_us(weights, count):.1f}" if rival and name in GEMLITE else ""
                print(
                    f"| {name} | {size} | {count} | {row.kernel} | {row.us:.1f} | {waiting} | {row.dense_us:.1f} "
                    f"| {row.speedup:.2f} | {row.floor_us:.1f} | {other} | {row.error / row.dense_error:.2f}"
                    f"{'' if row.passed else ' WRONG'} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
