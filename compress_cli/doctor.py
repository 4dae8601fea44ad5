"""`compress doctor`: what this machine can do, for people and for bug reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .console import Console
from .options import Command, kernel, reporting
from .units import size_text

if TYPE_CHECKING:
    from .runs.doctor import Diagnosis


@click.command("doctor", cls=Command)
@kernel
@reporting
def command(console: Console) -> None:
    """Show versions, devices, which kernel each scheme would run on, and why not a faster one.

    Exits with 1 when a package that is needed is missing or has a version that does not fit, or COMPRESS_KERNEL
    asks for what cannot run here.
    """
    from ..formats.errors import GateFailed
    from .runs.doctor import diagnose

    diagnosis = diagnose()
    console.result(diagnosis, lambda: _show(diagnosis, console))
    if diagnosis.problems:
        raise GateFailed("this machine", f"problems found: {len(diagnosis.problems)}", "do what each of them says")


def _show(diagnosis: Diagnosis, console: Console) -> None:
    machine = diagnosis.machine
    memory = "unknown memory" if machine.memory_bytes is None else f"{size_text(machine.memory_bytes)} of memory"
    console.say(f"compress {diagnosis.compress}, Python {diagnosis.python}, {machine.system}")
    console.say(f"{machine.processor}, {machine.cores} cores, {memory}")
    if machine.torch_threads is not None:
        console.say(f"torch: {machine.torch_threads} threads, {machine.cpu_capability}, CUDA {machine.cuda or 'none'}")
    console.say("GPUs: " + ("; ".join(machine.gpus) or "none"))
    console.table(
        {"package": "left", "installed": "left", "needed": "left", "": "left"},
        [
            (item.name, item.installed or "–", item.needed or "optional", "" if item.fits else "does not fit")
            for item in diagnosis.packages
        ],
    )
    console.table(
        {"scheme": "left", "packing": "left", "kernel": "left", "why no other": "left"},
        [
            (row.scheme, row.packing, row.picked, "; ".join(f"{name}: {why}" for name, why in row.others.items()))
            for row in diagnosis.kernels
        ],
    )
    for text in diagnosis.problems:
        console.say(f"Problem: {text}")
    for text in diagnosis.notes:
        console.say(f"Note: {text}")
