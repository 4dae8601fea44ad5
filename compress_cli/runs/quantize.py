"""The main journey: plan, calibrate, round, pack, write. Also the Python API, `compress_llm.quantize`.

Every finished unit (a decoder block, or what lies before or after the blocks) is on the disk with its journal entry
before the next one starts, so a killed run resumes after the last finished unit and ends in the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...formats.errors import InputError
from ...formats.journal import Journal
from ...formats.progress import Track, silent
from ...formats.writer import OutputDirectory
from .allocation import allocated
from .job import Job, config_json, prepare
from .memory import check_disk
from .plain_json import to_json
from .plan import Spec
from .recipe import Recipe
from .report import (
    CARD,
    REPORT,
    RUN,
    TABLE,
    LayerRow,
    Report,
    command_line,
    model_card,
    run_facts,
    to_csv,
    totals,
    versions,
)
from .work import Worker

if TYPE_CHECKING:
    from ...calibration.stream import Stream


def quantize(
    model: str | None,
    out: str | Path,
    recipe: Recipe | None = None,
    *,
    device: str = "auto",
    max_memory: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    track: Track = silent,
) -> Report:
    """Compress `model` (a directory, a cached Hub id, or None for the embedded default) into the directory `out`.

    Returns the report that is also written to `out`. Raises InputError before any work for what cannot succeed, and
    while blocks stream for NaN or Inf in a weight; nothing is left behind then. StoppedEarly keeps what was finished.
    """
    job = prepare(model, recipe or Recipe(), device=device, max_memory=max_memory, trust_remote_code=trust_remote_code)
    return execute(job, Path(out), resume=resume, overwrite=overwrite, track=track)


def execute(job: Job, out: Path, *, resume: bool, overwrite: bool, track: Track = silent) -> Report:
    """Run a prepared job."""
    started = datetime.now(timezone.utc)
    check_disk(out, job.output_bytes)
    target = OutputDirectory(out, overwrite=overwrite, resume=resume, source=job.plan.checkpoint.directory)
    with target:
        source = job.plan.checkpoint.sha256(track)
        journal = Journal.open(target.staging, _identity(job, source), resume)
        try:
            rows, written, hashes = _stream(job, target, journal, track)
        except InputError:
            target.discard()
            raise
        report = _report(job, source, rows, written, hashes)
        _finish(job, target, report, started)
    return report


def _stream(
    job: Job, target: OutputDirectory, journal: Journal, track: Track
) -> tuple[list[LayerRow], dict[str, Spec], dict[str, str]]:
    """Work off every unit that the journal does not have; returns all rows, and what is written of every tensor: its
    dtype and shape, and its hash."""
    ratios = allocated(job, _open_stream(job, track), track) if job.methods.allocate is not None else {}
    worker = Worker(job.plan, job.methods, _open_stream(job, track), job.device, ratios)
    units = job.plan.units
    for unit in track(units, "quantising", len(units)):
        entry = journal.completed.get(unit.index)
        if entry is not None and target.has_part(unit.index, entry.hashes):
            worker.replay(unit, target.read_part(unit.index))
        else:
            outputs, done = worker.unit(unit)
            hashes = target.write_part(unit.index, outputs)
            journal.record(unit.index, hashes, {"layers": [asdict(row) for row in done]})
    finished = [journal.completed[unit.index] for unit in units]  # read back, so that a resumed run says the same
    rows = [LayerRow(**row) for entry in finished for row in entry.payload["layers"]]
    hashes = {name: digest for entry in finished for name, digest in entry.hashes.items()}
    parts = [target.read_part(unit.index) for unit in units]
    written = {name: (info.dtype, info.shape) for part in parts for name, info in part.items()}
    return rows, written, hashes


def _open_stream(job: Job, track: Track) -> Stream | None:
    if job.windows is None:
        return None
    from ...calibration.stream import Stream  # brings in transformers' models, which plain rounding does not need

    stream = Stream(
        job.plan.checkpoint,
        job.plan.architecture,
        job.windows,
        device=job.device,
        dtype=job.compute_dtype,
        batch_size=job.batch_size,
        trust_remote_code=job.trust_remote_code,
    )
    stream.start(track)
    return stream


def _report(
    job: Job, source: str, rows: list[LayerRow], written: Mapping[str, Spec], hashes: Mapping[str, str]
) -> Report:
    tensors = {
        name: {"sha256": hashes[name], "dtype": str(dtype).removeprefix("torch."), "shape": list(shape)}
        for name, (dtype, shape) in sorted(written.items())
    }
    return Report(
        command=command_line(job.argument, job.plan.recipe),
        recipe=job.plan.recipe,
        source_sha256=source,
        dataset=job.dataset,
        layers=rows,
        tensors=tensors,
        totals=totals(job.plan, written),
        versions=versions(),
        warnings=job.warnings,
    )


def _finish(job: Job, target: OutputDirectory, report: Report, started: datetime) -> None:
    """Shards, config, side files, report; then the one rename."""
    target.assemble([unit.index for unit in job.plan.units])
    target.add_file("config.json", config_json(job.plan).encode())
    for file in job.plan.checkpoint.side_files:
        target.add_file(file.relative_to(job.plan.checkpoint.directory).as_posix(), file)
    target.add_file(TABLE, to_csv(report.layers).encode())
    target.add_file(CARD, model_card(report, job.model).encode())
    report.files = target.file_hashes()
    target.add_file(REPORT, (to_json(report.stable()) + "\n").encode())
    report.run = run_facts(started, job.device)
    target.add_file(RUN, (to_json(report.run) + "\n").encode())
    target.commit()


def _identity(job: Job, source: str) -> Mapping[str, Any]:
    """What must be the same for a resumed run to end in the same bytes."""
    return {
        "source_sha256": source,
        "recipe": job.plan.recipe.as_dict(),
        "dataset": job.dataset,
        "versions": versions(),
        "device": job.device,
        "compute_dtype": str(job.compute_dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }
