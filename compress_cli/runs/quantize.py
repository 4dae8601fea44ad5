"""The main journey: plan, calibrate, round, pack, write. Also the Python API, `compress_llm.quantize`.

Every finished unit (a decoder block, or what lies before or after the blocks) is on the disk with its journal entry
before the next one starts, so a killed run resumes after the last finished unit and ends in the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...calibration import embedded
from ...calibration.compute import probed_dtype
from ...calibration.sources import read_source
from ...calibration.tokenizer import load_tokenizer
from ...calibration.windows import Windows, calibration_windows
from ...formats.checkpoint import Checkpoint, resolve
from ...formats.container import Spec, container_bytes, split
from ...formats.errors import InputError
from ...formats.journal import Journal
from ...formats.progress import Track, silent
from ...formats.quantization_config import build
from ...formats.writer import MAX_SHARD_BYTES, OutputDirectory
from .device import pick_device
from .memory import check_disk, check_memory, peak_memory_estimate
from .methods import Chain, chain, check_fit, fields_wanted
from .plan import Plan, ignored_modules, make_plan
from .plain_json import to_json
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


@dataclass(frozen=True)
class Job:
    """A run that has passed every check that headers allow."""

    model: str
    plan: Plan
    methods: Chain
    fields: frozenset[Any]
    windows: Windows | None
    dataset: dict[str, Any] | None
    device: str
    compute_dtype: torch.dtype
    trust_remote_code: bool
    peak_memory: int
    output_bytes: int

    @property
    def warnings(self) -> list[str]:
        """What the user should know before and after."""
        return [
            *self.plan.checkpoint.warnings,
            *self.plan.warnings,
            *(self.windows.warnings if self.windows is not None else ()),
        ]


def prepare(
    model: str | None,
    recipe: Recipe,
    *,
    device: str = "auto",
    max_memory: int | None = None,
    trust_remote_code: bool = False,
) -> Job:
    """Everything before the first weight is read. Raises InputError for whatever cannot work."""
    directory = embedded.model_path() if model is None else resolve(model)
    checkpoint = Checkpoint.open(directory)
    methods = chain(recipe)
    plan = make_plan(recipe, checkpoint)
    schemes = {layer.scheme for layer in plan.quantized if layer.scheme is not None}
    check_fit(methods, schemes)
    fields = fields_wanted(methods, schemes)
    calibrated = bool(fields) or recipe.dataset is not None
    estimate = peak_memory_estimate(plan, calibrated)
    check_memory(estimate, max_memory)
    windows, dataset = None, None
    if calibrated:
        windows, dataset = _calibration_text(directory, recipe, trust_remote_code)
    place = str(pick_device(device))
    return Job(
        model=_shown_name(model, directory),
        plan=plan,
        methods=methods,
        fields=fields,
        windows=windows,
        dataset=dataset,
        device=place,
        compute_dtype=_compute_dtype(recipe, place, plan),
        trust_remote_code=trust_remote_code,
        peak_memory=estimate,
        output_bytes=_output_bytes(plan),
    )


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
    job = prepare(
        model, recipe or Recipe(), device=device, max_memory=max_memory, trust_remote_code=trust_remote_code
    )
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
            rows, tensors = _stream(job, target, journal, track)
        except InputError:
            target.discard()
            raise
        report = _report(job, source, rows, tensors)
        _finish(job, target, report, started)
    return report


def _stream(
    job: Job, target: OutputDirectory, journal: Journal, track: Track
) -> tuple[list[LayerRow], dict[str, dict[str, Any]]]:
    """Work off every unit that the journal does not have; returns all rows and the hash of every tensor."""
    worker = Worker(job.plan, job.methods, job.fields, _open_stream(job, track), job.device)
    rows: list[LayerRow] = []
    hashes: dict[str, str] = {}
    units = job.plan.units
    for unit in track(units, "quantising", len(units)):
        entry = journal.completed.get(unit.index)
        if entry is not None and target.has_part(unit.index, entry.hashes):
            worker.replay(unit, target.read_part(unit.index))
            done = [LayerRow(**row) for row in entry.payload["layers"]]
            written = entry.hashes
        else:
            outputs, done = worker.unit(unit)
            written = target.write_part(unit.index, outputs)
            journal.record(unit.index, written, {"layers": [asdict(row) for row in done]})
        rows += done
        hashes.update(written)
    tensors = {
        name: {"sha256": hashes[name], "dtype": str(dtype).removeprefix("torch."), "shape": list(shape)}
        for name, (dtype, shape) in sorted(job.plan.tensors.items())
    }
    return rows, tensors


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
        batch_size=job.plan.recipe.batch_size,
        trust_remote_code=job.trust_remote_code,
    )
    stream.start(track)
    return stream


def _report(job: Job, source: str, rows: list[LayerRow], tensors: dict[str, dict[str, Any]]) -> Report:
    return Report(
        command=command_line(job.model, job.plan.recipe),
        recipe=job.plan.recipe,
        source_sha256=source,
        dataset=job.dataset,
        layers=rows,
        tensors=tensors,
        totals=totals(job.plan),
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


def config_json(plan: Plan) -> str:
    """The output's config.json: the source's, with `quantization_config`, and untied when the head is packed."""
    schemes = {layer.name: layer.scheme for layer in plan.quantized if layer.scheme is not None}
    config: dict[str, Any] = dict(plan.checkpoint.config)
    if plan.packs_head:
        config["tie_word_embeddings"] = False
    order = "static" if "gptq" in plan.recipe.methods else None
    config["quantization_config"] = build(schemes, ignored_modules(plan), order)
    return to_json(config) + "\n"


def _output_bytes(plan: Plan) -> int:
    """Bytes of the weight files, config.json and the side files; report and index apart."""
    sides = sum(file.stat().st_size for file in plan.checkpoint.side_files)
    specs = {name: Spec(dtype, shape) for name, (dtype, shape) in plan.tensors.items()}
    shards = split(specs, MAX_SHARD_BYTES)
    weights = sum(container_bytes({name: specs[name] for name in names}) for names in shards)
    return weights + len(config_json(plan).encode()) + sides


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


def _calibration_text(
    directory: Path, recipe: Recipe, trust_remote_code: bool
) -> tuple[Windows, dict[str, Any]]:
    corpus = read_source(recipe.dataset or "embedded", "calibration")
    tokenizer = load_tokenizer(directory, trust_remote_code)
    windows = calibration_windows(corpus, tokenizer, recipe.num_samples, recipe.seq_len, recipe.seed)
    return windows, {
        "name": corpus.name,
        "sha256": corpus.sha256,
        "tokens": windows.tokens,
        "windows": windows.ids.shape[0],
    }


def _compute_dtype(recipe: Recipe, device: str, plan: Plan) -> torch.dtype:
    """What blocks compute in: `--dtype`, else the checkpoint's own on a GPU and the faster one on a CPU."""
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if recipe.dtype is not None:
        if recipe.dtype not in names:
            raise InputError(f"--dtype {recipe.dtype}", "is not a dtype to compute in", "use " + ", ".join(names))
        return names[recipe.dtype]
    if device == "cpu":
        return probed_dtype()
    return plan.checkpoint.tensors[plan.quantized[0].source].dtype


def _shown_name(model: str | None, directory: Path) -> str:
    """How the model is called in reports: without the folders of this machine."""
    if model is None:
        return embedded.MODEL_NAME
    return directory.resolve().name if os.path.isdir(os.path.expanduser(model)) else model
