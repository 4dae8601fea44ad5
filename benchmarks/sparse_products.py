"""Products with half-empty bfloat16 weights against dense ones on a GPU, and against 2:4 by cuSPARSELt: a table.

    python benchmarks/sparse_products.py [--shape 14336x4096 …] [--tokens 1 …] [--mask iid --mask wanda] [--routes]
        [--kernel three-layer]

Everything is measured in one process, as in products.py. The floor is what reading the weights' bytes (and x and y)
takes at the bandwidth that a copy reaches. `--routes` times every CUDA kernel that takes so many tokens, for
kernels/sparse/routes.json. `--kernel` measures one of another name than would be picked, in its own layout.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import click
import torch
from torch.nn import functional

from compress_llm.compress_cli.runs.bench import GPU_SHAPES, shape
from compress_llm.compress_cli.runs.bench_kernels import cell
from compress_llm.compress_cli.runs.bench_sparse import Mask, SparseWeights
from compress_llm.compress_cli.runs.device import pick_device
from compress_llm.compress_cli.runs.timing import interleaved, limits
from compress_llm.kernels.sparse.cuda_decode import MOST_TOKENS

TOKENS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)
MOST_DECODE, MOST_BATCH = 4 * MOST_TOKENS, 256


def two_of_four_calls(weights: SparseWeights, x: torch.Tensor) -> list[Callable[[], object]]:
    """Products with 2:4 weights of the same shape, each a copy of its own: two largest of every four left."""
    order = weights.dense[0].float().abs().view(-1, 4).argsort(-1, descending=True).argsort(-1)
    pruned = weights.dense[0] * (order < 2).view(weights.shape)
    kept = [torch.sparse.to_sparse_semi_structured(pruned) for _ in weights.arranged]
    return [partial(functional.linear, x, weight) for weight in kept]


def two_of_four_us(weights: SparseWeights, x: torch.Tensor) -> float:
    """Microseconds of the product with 2:4 weights; not a number where PyTorch's build or the library cannot."""
    dense = [lambda dense=dense: functional.linear(x, dense) for dense in weights.dense]
    try:
        return interleaved({"2:4": two_of_four_calls(weights, x), "dense": dense}, weights.device)["2:4"].us
    except RuntimeError as error:
        print(f"<!-- 2:4 at {x.shape[0]} tokens: {str(error).splitlines()[0]} -->")
        return float("nan")


def every_kernel_us(weights: SparseWeights, x: torch.Tensor) -> dict[str, float]:
    """Microseconds of each CUDA kernel that takes so many tokens, and of the dense product in turn with them."""
    candidates: dict[str, list[Callable[[], object]]] = {}
    for name, most in (("decode", MOST_DECODE), ("batch", MOST_BATCH), ("dense", x.shape[0])):
        if x.shape[0] <= most:
            candidates[name] = [*weights.products(x, route=name)]
    candidates["cuBLAS"] = [lambda dense=dense: functional.linear(x, dense) for dense in weights.dense]
    return {name: timing.us for name, timing in interleaved(candidates, weights.device).items()}


@click.command()
@click.option("--shape", "shapes", multiple=True, metavar="OUTxIN", default=GPU_SHAPES)
@click.option("--tokens", multiple=True, type=int, default=TOKENS)
@click.option("--mask", "masks", multiple=True, type=click.Choice(["iid", "wanda"]), default=("iid", "wanda"))
@click.option("--kept", default=0.5, show_default=True)
@click.option("--routes", is_flag=True, help="Time every kernel.")
@click.option("--kernel", help="Measure this implementation, whichever would be picked.")
@click.option("--device", default="auto")
def main(
    shapes: tuple[str, ...],
    tokens: tuple[int, ...],
    masks: tuple[Mask, ...],
    kept: float,
    routes: bool,
    kernel: str | None,
    device: str,
) -> None:
    """Print the tables."""
    if routes and kernel:
        raise click.UsageError("--routes is about the kernels that are picked: leave out --kernel")
    place = pick_device(device)
    can = limits(place)
    print(f"{can.bytes_per_second / 1e12:.2f} TB/s copied, {can.operations_per_second / 1e12:.0f} T operations/s\n")
    print(
        "| mask | weight | B/weight | tokens | kernel | µs | waiting | dense µs | × | × waiting | floor | 2:4 µs |",
        end="",
    )
    print(" error / dense | every kernel, µs |\n|---|---|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---|")
    for mask in masks:
        for size in shapes:
            begun = time.perf_counter()
            weights = SparseWeights(shape(size), place, torch.bfloat16, mask, kept, asked=kernel)
            took, cut = time.perf_counter() - begun, weights.arranged[0].cut
            print(f"<!-- {size} {mask}: packed and copied in {took:.1f} s, {cut} -->")
            each = weights.nbytes / weights.dense[0].numel()
            for count in tokens:
                row = cell(weights, count, can)
                x = torch.randn(count, weights.shape[1], device=place, dtype=weights.dtype)
                two_of_four, more = two_of_four_us(weights, x), every_kernel_us(weights, x) if routes else {}
                waiting = row.without_early_start_us or row.us
                rest = ", ".join(f"{name} {us:.1f}" for name, us in more.items())
                print(
                    f"| {mask} | {size} | {each:.4f} | {count} | {row.kernel} | {row.us:.1f} | {waiting:.1f} "
                    f"| {row.dense_us:.1f} | {row.speedup:.2f} | {row.dense_us / waiting:.2f} | {row.floor_us:.1f} "
                    f"| {two_of_four:.1f} | {row.error / row.dense_error:.2f}"
                    f"{'' if row.passed else ' WRONG'} | {rest} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
