"""The plan as a report: what `quantize --dry-run --json` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .job import Job
from .memory import check_disk
from .report import command_line, totals, versions


def dry_run_report(job: Job, out: Path) -> dict[str, Any]:
    """Layers and totals as in the report of a run, without errors, and `output_bytes`. Raises InputError on a full
    disk.

    `output_bytes` counts the weights file, config.json and the side files; the report files and the shard index are not
    counted. Sizes are exact, but for layers where `exact` is false: the data decide, and it is said what to expect.
    """
    check_disk(out, job.output_bytes)
    plan = job.plan
    return {
        "command": command_line(job.argument, plan.recipe),
        "recipe": plan.recipe.as_dict(),
        "source_sha256": None,
        "dataset": job.dataset,
        "layers": [
            {
                "name": layer.name,
                "scheme": layer.scheme.name if layer.scheme else None,
                "method": job.methods.label(layer.scheme) if layer.scheme else None,
                "group_size": layer.scheme.group_size if layer.scheme else None,
                "rotation": layer.scheme.rotation if layer.scheme else None,
                "reason": layer.reason,
                "bits_per_weight": layer.bits_per_weight,
                "bytes_before": layer.bytes_before,
                "bytes": layer.bytes_after,
                "exact": layer.exact,
                "weight_error": None,
                "output_error": None,
            }
            for layer in plan.layers
        ],
        "totals": {**totals(plan), "seconds": None, "peak_memory_bytes": job.peak_memory},
        "output_bytes": job.output_bytes,
        "versions": versions(),
        "warnings": job.warnings,
    }
