"""`compress inspect`: what is in a directory, as a table of its matrices and a line of totals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from . import options
from .console import Console
from .units import size_text

if TYPE_CHECKING:
    from .runs.inspect import Inspection, LayerView


@click.command("inspect", cls=options.Command)
@click.argument("directory", metavar="DIR")
@options.reporting
def command(directory: str, console: Console) -> None:
    """Show what is in DIR, packed or plain: scheme, bits and bytes of every linear, and the totals."""
    from .runs.inspect import inspect

    result = inspect(directory)
    for warning in result.warnings:
        console.warn(warning)
    console.result(result, lambda: _show(console, result))


def _show(console: Console, result: Inspection) -> None:
    with_errors = any(row.weight_error is not None for row in result.layers)
    columns = {"layer": "left", "scheme": "left", "group": "right", "shape": "right", "bits": "right", "bytes": "right"}
    if with_errors:
        columns |= {"weight error": "right", "output error": "right"}
    console.table(columns, [_row(row, with_errors) for row in result.layers])  # pyright: ignore[reportArgumentType]
    total = result.totals
    console.say(f"{result.model_type or 'unknown model type'}, {result.format or 'not quantised'}")
    console.say(f"{total.packed_layers} packed linears, {total.parameters:,} parameters, {size_text(total.bytes)}")
    bits = f"{total.bits_per_weight_model:.3f} bits per weight over the whole model"
    if total.bits_per_weight is not None:
        bits += f", {total.bits_per_weight:.3f} over the packed linears"
    console.say(f"{bits} (other tensors: {size_text(total.rest_bytes)})")


def _row(row: LayerView, with_errors: bool) -> list[str]:
    cells = [
        row.name,
        row.scheme or row.dtype,
        "" if row.scheme is None else str(row.group_size or "channel"),
        "×".join(map(str, row.shape)),
        f"{row.bits_per_weight:.3f}",
        f"{row.bytes:,}",
    ]
    if with_errors:
        cells += ["" if value is None else f"{value:.4f}" for value in (row.weight_error, row.output_error)]
    return cells
