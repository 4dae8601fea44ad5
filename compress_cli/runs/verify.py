"""Proves that a packed directory is what its report says, bit for bit. Also the Python API, `compress_llm.verify`.

Without the source: files, tensors, shapes and hashes as promised, every packed tensor decoded by two decoders that
share no code, and the kernels of this machine compared with them. With it also that the codes and scales stand for its
weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...calibration import embedded
from ...formats.checkpoint import Checkpoint, resolve
from ...formats.errors import InputError
from ...formats.progress import Track, silent
from ...kernels.registry import check_asked
from .against_source import Source, check_kept, check_settings, check_source, weight_faults
from .checks import (
    Check,
    check,
    check_config,
    check_contents,
    check_files,
    check_layout,
    check_names,
    decode_faults,
)
from .device import pick_device
from .kernel_check import KernelChecks
from .report import REPORT
from .saved_report import SavedReport, read_report
from .stored import Packed


@dataclass(frozen=True)
class Verification:
    """What `verify --json` prints: whether every check passed, and each with what it saw or found."""

    passed: bool
    checks: list[Check]


def verify(directory: str | Path, reference: str | Path | None = None, *, track: Track = silent) -> Verification:
    """Check the output `directory` of a quantise run, with `reference` (a directory or a cached Hub id) its source.

    Whatever is wrong with the directory is a failed check. Raises InputError where nothing can be checked: there is no
    such directory, it has no report, the reference cannot be read, or COMPRESS_KERNEL asks for what cannot run here.
    """
    place = resolve(str(directory))
    check_asked(pick_device().type)
    source = None if reference is None else _source(str(reference))
    checks = list(_checks(place, source, track))
    return Verification(all(item.passed for item in checks), checks)


def _source(reference: str) -> Source:
    return Source(Checkpoint.open(embedded.model_directory(reference, "--reference")))


def _checks(directory: Path, source: Source | None, track: Track) -> Iterator[Check]:
    """Every check in order; those that rest on a failed one are left out."""
    try:
        report = read_report(directory)
    except InputError as error:
        yield Check("report", False, str(error))
        return
    if report is None:
        fix = "name the output of a quantise run; `compress inspect` shows any other directory"
        raise InputError(str(directory), f"has no {REPORT} to check against", fix)
    yield Check("report", True, f"{len(report.layers)} packed linears, {len(report.tensors)} tensors")
    yield check_files(directory, report, track)
    try:
        checkpoint = Checkpoint.open(directory)
    except InputError as error:
        yield Check("headers", False, str(error))
        return
    yield Check("headers", True, f"{len(checkpoint.shards)} weight files")
    yield check_names(checkpoint, report)
    yield check_layout(checkpoint, report)
    yield from check_contents(checkpoint, report, track)
    agreement, packed = check_config(checkpoint, report)
    yield agreement
    yield from _check_weights(checkpoint, report, packed, source, track)
    if source is not None:
        yield check_source(source, report, track)
        yield check_settings(source, checkpoint.config)
        yield check_kept(source, report, packed, track)


def _check_weights(
    checkpoint: Checkpoint, report: SavedReport, packed: list[Packed], source: Source | None, track: Track
) -> Iterator[Check]:
    """Each packed linear is read once, decoded, and compared with its source."""
    undecoded: list[str] = []
    wrong: list[str] = []
    kernels = KernelChecks(pick_device())
    for linear in track(packed, "decoding", len(packed)):
        tensors = linear.read(checkpoint)
        faults = decode_faults(linear, tensors)
        undecoded += faults
        if not faults:
            kernels.look(linear, tensors)
        if source is not None and not faults:
            wrong += weight_faults(source, linear, tensors, report)
    yield check("decoding", undecoded, f"{len(packed)} packed linears, the same bits from two decoders")
    yield kernels.result()
    if source is not None:
        yield check(
            "weight errors", wrong, f"{len(packed)} packed linears as far from the reference as the report says"
        )
