"""`compress verify`: a directory checked against its report and, if given, its source; exit 1 when a check fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from . import options
from .console import Console

if TYPE_CHECKING:
    from .runs.verify import Verification


@click.command("verify", cls=options.Command)
@click.argument("directory", metavar="DIR")
@options.reference
@options.kernel
@options.reporting
def command(directory: str, reference: str | None, console: Console) -> None:
    """Check that DIR, an output of quantize, is bit for bit what its report says.

    Every file and tensor is hashed and every packed tensor decoded by two decoders that share no code; for each shape
    the kernel that this machine would run is compared with them. With --reference MODEL (`embedded` names the embedded
    model) the error of every weight is computed again from the source.
    """
    from ..formats.errors import GateFailed
    from .runs.verify import verify

    result = verify(directory, reference, track=console.track)
    console.result(result, lambda: _show(console, result))
    failed = [item.name for item in result.checks if not item.passed]
    if failed:
        cause = f"{len(failed)} of {len(result.checks)} checks failed ({', '.join(failed)})"
        fix = "copy it again from where it is whole, or quantize again"
        if "source" in failed:
            fix = "name the model that it was made from as --reference, or quantize again"
        raise GateFailed(directory, cause, fix)


def _show(console: Console, result: Verification) -> None:
    rows = [[item.name, "ok" if item.passed else "FAILED", item.detail] for item in result.checks]
    console.table({"check": "left", "": "left", "detail": "left"}, rows)
