"""`compress bench`: how fast packed weights are here; exit 1 when a product is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

from . import options
from .console import Console
from .units import size_text

if TYPE_CHECKING:
    from .runs.bench import Bench
    from .runs.bench_kernels import Cell


@click.command("bench", cls=options.Command)
@click.argument("directory", metavar="[DIR]", required=False)
@click.option(
    "--scheme", "scheme_names", multiple=True, help="Without DIR: what to measure; repeatable.  [default: W4A16]"
)
@click.option("--group-size", metavar="N|channel", help="Without DIR: inputs that share a scale.")
@click.option("--shape", "shapes", multiple=True, metavar="OUTxIN", help="Without DIR: sizes of weights; repeatable.")
@click.option("--tokens", multiple=True, type=click.IntRange(1), help="Rows of the input; repeatable.")
@options.reference
@click.option("--tune", "search", is_flag=True, help="First search faster configurations for this GPU, and keep them.")
@options.device
@options.kernel
@options.reporting
def command(directory: str | None, console: Console, group_size: str | None, **flags: Any) -> None:
    """Time products with packed weights against dense bfloat16 ones, and check them.

    With DIR, an output of quantize: its shapes and schemes, and decoding of the whole model, against --reference MODEL
    if given. Without: random weights of the schemes and shapes named.
    """
    from ..formats.errors import GateFailed
    from .runs.bench import bench

    result = bench(directory, group_size=_group_size(group_size), track=console.track, **flags)
    console.result(result, lambda: _show(console, result))
    wrong = [_name(cell) for cell in result.kernels if not cell.passed]
    if wrong:
        raise GateFailed("kernels", f"wrong results for {', '.join(wrong)}", "use --kernel triton, and report it")


def _group_size(text: str | None) -> int | Literal["channel"] | None:
    from ..formats.errors import InputError

    if text is None or text == "channel":
        return text
    if not text.isdecimal():
        raise InputError(f"--group-size {text}", "is not a group size", "give a positive number or channel")
    return int(text)


def _name(cell: Cell) -> str:
    return f"{cell.scheme} {cell.out_features}x{cell.in_features}, {cell.tokens} tokens"


def _show(console: Console, result: Bench) -> None:
    console.say(
        f"{result.device}, torch {result.torch}: copies {size_text(int(result.bytes_per_second))}/s, "
        f"products {result.operations_per_second / 1e12:.2f} Tera-operations/s"
    )
    for row in result.tuned:
        console.say(
            f"{row.key}: {row.before_us:.1f} → {row.after_us:.1f} µs, "
            f"{row.tried} configurations, {row.wrong} of them wrong"
        )
    columns = ("scheme", "group", "weight", "tokens", "kernel", "µs", "waiting", "dense", "×", "floor", "error", "")
    rows = [_row(cell) for cell in result.kernels]
    console.table({name: "left" if index in (0, 4) else "right" for index, name in enumerate(columns)}, rows)
    if result.decoding is not None:
        speeds = [result.decoding.packed, *([result.decoding.dense] if result.decoding.dense else [])]
        console.table(
            {"model": "left", "ms per token": "right", "tokens/s": "right", "stored": "right", "peak to load": "right"},
            [
                (
                    speed.model,
                    f"{speed.ms_per_token:.3f}",
                    f"{speed.tokens_per_second:,.1f}",
                    size_text(speed.stored_bytes),
                    "–" if speed.peak_bytes is None else size_text(speed.peak_bytes),
                )
                for speed in speeds
            ],
        )
        if result.decoding.speedup is not None:
            console.say(f"{result.decoding.speedup:.2f} times as fast as the original")


def _row(cell: Cell) -> tuple[str, ...]:
    return (
        cell.scheme,
        str(cell.group_size or "channel"),
        f"{cell.out_features}x{cell.in_features}",
        str(cell.tokens),
        cell.kernel,
        f"{cell.us:.1f}",
        "–" if cell.without_early_start_us is None else f"{cell.without_early_start_us:.1f}",
        f"{cell.dense_us:.1f}",
        f"{cell.speedup:.2f}",
        f"{cell.floor_us:.1f}",
        f"{cell.error:.1e}",
        "" if cell.passed else "WRONG",
    )
