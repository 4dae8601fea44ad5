"""`compress quantize`: flags to a recipe, the plan on the screen, the run, the table at the end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import options
from .console import Console
from .units import size_text, time_text

if TYPE_CHECKING:
    from .runs.job import Job
    from .runs.report import LayerRow, Report

WORST = 8


@click.command("quantize", cls=options.Command)
@click.argument("model", required=False)
@click.option("--output", "-o", "out", required=True, type=options.Place(), help="Directory to write.")
@click.option("--scheme", help="W4A16 (default), W8A8, FP8_DYNAMIC, NVFP4A16, MXFP4, SPARSE50, …")
@click.option("--method", help="Transforms, a rotation or a sparsifier, one rounding, comma separated.")
@click.option("--group-size", metavar="N|channel|auto", help="Inputs that share a scale; auto fits each layer.")
@click.option("--sym/--asym", "symmetric", default=None, help="Without or with zero points.")
@click.option("--scale-rule", metavar="NAME", help="How scales are chosen, such as minmax, mse, local-hessian.")
@click.option("--input-scale-rule", metavar="NAME", help="The same for inputs of NVFP4: max, four-over-six, mse.")
@click.option("--sparsity", type=float, help="Share of weights that sparse schemes drop, 0.3 to 0.7.")
@click.option("--pattern", metavar="NAME", help="Which of them may go: unstructured, 2:4, 4:8.")
@click.option("--allocate", metavar="RULE", help="Ratios by layer at the same average: owl, error.")
@click.option("--refit", is_flag=True, default=None, help="Fit what pruning leaves to the outputs of the whole weight.")
@click.option("--sparse-layout", metavar="NAME", help="How sparse weights are stored: three-layer, bitmap.")
@click.option("--target", "targets", multiple=True, metavar="PATTERN", help="Quantise only these linears.")
@click.option("--ignore", multiple=True, metavar="PATTERN", help="Leave these linears as they are.")
@click.option("--lm-head", metavar="SCHEME", help="Quantise the head too.")
@click.option("--recipe", "recipe_file", type=options.Place(), help="YAML file; flags override it.")
@options.dataset
@click.option("--num-samples", type=int, help="Calibration windows.  [default: 128]")
@click.option("--seq-len", type=int, help="Tokens a window.  [default: 512]")
@click.option("--batch-size", type=int, help="Windows that go through a block together.  [default: 8]")
@click.option("--seed", type=int, help="Seed of every random choice.  [default: 0]")
@options.device
@click.option("--dtype", help="What blocks compute in: float32, bfloat16 or float16.")
@click.option("--max-memory", metavar="SIZE", help="Refuse to start when more is needed, for example 4GiB.")
@click.option("--resume", is_flag=True, help="Go on after the last finished block of a stopped run.")
@click.option("--overwrite", is_flag=True, help="Replace OUT once the new one stands.")
@click.option("--dry-run", is_flag=True, help="Show the plan and its sizes; write nothing.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the model.")
@options.reporting
def command(
    model: str | None,
    out: Path,
    recipe_file: Path | None,
    device: str,
    max_memory: str | None,
    resume: bool,
    overwrite: bool,
    dry_run: bool,
    trust_remote_code: bool,
    console: Console,
    **flags: Any,
) -> None:
    """Compress MODEL (a directory or a cached Hub id; without it, the embedded default) into OUT."""
    from ..formats.writer import check_out, unfinished_parts
    from .runs import recipe as recipes
    from .runs.job import prepare
    from .runs.quantize import execute

    flags["group_size"] = _group_size(flags["group_size"])
    base = recipes.load(recipe_file) if recipe_file is not None else recipes.Recipe()
    recipe = recipes.override(base, flags)
    job = prepare(model, recipe, device=device, max_memory=_size(max_memory), trust_remote_code=trust_remote_code)
    if not dry_run:
        check_out(out.absolute(), overwrite, job.plan.checkpoint.directory)
    for warning in job.warnings:
        console.warn(warning)
    if dry_run:
        from .runs.dry_run import dry_run_report

        console.result(dry_run_report(job, out), lambda: _show_plan(console, job))
        return
    if not resume and (count := unfinished_parts(out.absolute())):
        console.warn(f"parts of a stopped run are dropped ({count}); --resume would have gone on with them")
    report = execute(job, out, resume=resume, overwrite=overwrite, track=console.track)
    console.result(report.full(), lambda: _show_report(console, report, out))


def _group_size(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.removeprefix("-").isdecimal() else text


def _size(text: str | None) -> int | None:
    """Bytes of a size such as `4GiB` or `500MB`. Raises InputError."""
    if text is None:
        return None
    import re

    from ..formats.errors import InputError

    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise InputError(f"--max-memory {text}", "is not a size", "write a number and a unit, such as 4GiB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** (" KMGT".index(match[2].upper() or " ")))


def _show_plan(console: Console, job: Job) -> None:
    plan = job.plan
    rows = [
        [
            layer.name,
            layer.scheme.name if layer.scheme else f"kept ({layer.reason})",
            str(layer.scheme.group_size or "channel") if layer.scheme else "",
            f"{layer.shape[0]}×{layer.shape[1]}",
            f"{layer.bits_per_weight:.3f}" if layer.outputs else "",
            f"{layer.bytes_before:,}",
            ("" if layer.exact else "about ") + f"{layer.bytes_after:,}",
        ]
        for layer in plan.layers
    ]
    columns = {"layer": "left", "scheme": "left", "group": "right", "shape": "right"}
    console.table({**columns, "bits": "right", "bytes before": "right", "bytes after": "right"}, rows)  # type: ignore[arg-type]
    about = "" if all(layer.exact for layer in plan.layers) else "about "
    console.say(
        f"Output: {about}{job.output_bytes:,} bytes ({size_text(job.output_bytes)}) of weights, config and side files"
    )
    console.say(f"Peak memory: about {size_text(job.peak_memory)}. Nothing was written.")


def _show_report(console: Console, report: Report, out: Path) -> None:
    total, run = report.totals, report.run
    worst = sorted(report.layers, key=lambda row: -(row.output_error or row.weight_error))[:WORST]
    console.table(
        {"worst layers": "left", "scheme": "left", "bits": "right", "weight error": "right", "output error": "right"},
        [_worst_row(row) for row in worst],
    )
    ratio = total["bytes_before"] / total["bytes_after"]
    before, after = size_text(total["bytes_before"]), size_text(total["bytes_after"])
    console.table(
        {"": "left", "result": "right"},
        [
            ["weights", f"{before} → {after} ({ratio:.2f}× smaller)"],
            ["bits per weight, packed linears", f"{total['bits_per_weight']:.3f}"],
            ["bits per weight, whole model", f"{total['bits_per_weight_model']:.3f}"],
            ["time", time_text(run["seconds"])],
            ["peak memory", size_text(run["peak_memory_bytes"])],
            ["written to", str(out)],
        ],
    )


def _worst_row(row: LayerRow) -> list[str]:
    output = "" if row.output_error is None else f"{row.output_error:.4f}"
    return [row.name, row.scheme, f"{row.bits_per_weight:.3f}", f"{row.weight_error:.4f}", output]
