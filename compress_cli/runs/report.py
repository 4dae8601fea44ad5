"""What a run leaves behind for people and machines: the report, the per-layer table, the model card.

`compress_report.json` holds only what the same run gives again, byte for byte; time, memory and host go to `run.json`.
"""

from __future__ import annotations

import csv
import io
import math
import platform
import resource
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ... import __version__
from ...formats.scheme import INPUT_RULES, scheme
from .plan import Plan, Spec, spec_bytes
from .recipe import Recipe

REPORT, RUN, TABLE, CARD = "compress_report.json", "run.json", "compress_layers.csv", "README.md"
REPORTED_PACKAGES = ("torch", "transformers", "safetensors", "tokenizers")


@dataclass(frozen=True)
class LayerRow:
    """One quantised linear as the report shows it.

    `weight_error` is ‖W−Ŵ‖/‖W‖ of the weight that was rounded; `output_error` the relative root mean square error of
    the layer's output on the calibration text, null without calibration. `transformed` says that a transform rescaled
    the weight first, so that it no longer equals the source's; `rotation` in which basis it was rounded (`Scheme`).
    """

    name: str
    scheme: str
    method: str
    group_size: int | None
    bits_per_weight: float
    bytes: int
    weight_error: float
    output_error: float | None = None
    transformed: bool = False
    rotation: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    """The report of a quantise run; `run` (time, memory, host) is kept apart from what is reproducible."""

    command: str
    recipe: Recipe
    source_sha256: str
    dataset: dict[str, Any] | None
    layers: list[LayerRow]
    tensors: dict[str, dict[str, Any]]
    totals: dict[str, Any]
    versions: dict[str, str]
    warnings: list[str]
    files: dict[str, str] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)

    def stable(self) -> dict[str, Any]:
        """The dictionary of `compress_report.json`."""
        data = asdict(self)
        data["recipe"] = self.recipe.as_dict()
        del data["run"]
        return data

    def full(self) -> dict[str, Any]:
        """Report and run together, as `quantize --json` prints them."""
        data = self.stable()
        data["totals"] = {**self.totals, **{key: self.run.get(key) for key in ("seconds", "peak_memory_bytes")}}
        data["run"] = self.run
        return data


def versions() -> dict[str, str]:
    """Versions of everything that may change a result."""
    found = {"compress": __version__, "python": platform.python_version()}
    for package in REPORTED_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def peak_memory_bytes() -> int:
    """Largest resident set of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def run_facts(started: datetime, device: str) -> dict[str, Any]:
    """What belongs to this one run: when, where, how long, how much memory."""
    finished = datetime.now(timezone.utc)
    return {
        "started": started.isoformat(timespec="seconds"),
        "finished": finished.isoformat(timespec="seconds"),
        "seconds": round((finished - started).total_seconds(), 3),
        "peak_memory_bytes": peak_memory_bytes(),
        "peak_device_memory_bytes": torch.cuda.max_memory_allocated(device) if device.startswith("cuda") else None,
        "device": device,
        "host": socket.gethostname(),
        "platform": platform.platform(),
    }


def totals(plan: Plan, written: Mapping[str, Spec] | None = None) -> dict[str, Any]:
    """Sizes before and after; bits per weight of the packed linears and of every stored parameter.

    `written` are the tensors as they came out, None before: then those of the plan count.
    """
    specs = plan.tensors if written is None else written
    before = plan.checkpoint.nbytes
    after = sum(spec_bytes(spec) for spec in specs.values())
    packed = sum(spec_bytes(specs[name]) for layer in plan.quantized for name in layer.outputs)
    packed_weights = sum(layer.weights for layer in plan.quantized)
    parameters = sum(math.prod(info.shape) for info in plan.checkpoint.tensors.values())
    parameters += sum(layer.weights for layer in plan.quantized if not layer.bytes_before)  # a head no longer tied
    return {
        "bytes_before": before,
        "bytes_after": after,
        "bits_per_weight": 8 * packed / packed_weights,
        "bits_per_weight_model": 8 * after / parameters,
        "packed_layers": len(plan.quantized),
    }


def command_line(model: str, recipe: Recipe) -> str:
    """The command that makes this output again, with OUT for the place it is written to."""
    words = ["compress", "quantize", model, "-o", "OUT"]
    plain = Recipe()
    flags = {
        "scheme": "--scheme",
        "sparsity": "--sparsity",
        "pattern": "--pattern",
        "sparse_layout": "--sparse-layout",
        "allocate": "--allocate",
        "method": "--method",
        "group_size": "--group-size",
        "scale_rule": "--scale-rule",
        "input_scale_rule": "--input-scale-rule",
        "lm_head": "--lm-head",
        "dataset": "--dataset",
        "num_samples": "--num-samples",
        "seq_len": "--seq-len",
        "batch_size": "--batch-size",
        "seed": "--seed",
        "dtype": "--dtype",
    }
    for name, flag in flags.items():
        value = getattr(recipe, name)
        if name == "method":
            value = ",".join(recipe.methods)
        if value is not None and (name in ("scheme", "method") or value != getattr(plain, name)):
            words += [flag, str(value)]
    if recipe.refit:
        words.append("--refit")
    if recipe.symmetric is not None:
        words.append("--sym" if recipe.symmetric else "--asym")
    for flag, patterns in (("--target", recipe.targets), ("--ignore", recipe.ignore)):
        for pattern in patterns:
            words += [flag, pattern]
    return shlex.join(words) + (" --recipe RECIPE" if recipe.rules or recipe.options else "")


def to_csv(rows: Sequence[LayerRow]) -> str:
    """The per-layer table as CSV."""
    out = io.StringIO()
    columns = ("name", "scheme", "method", "group_size", "bits_per_weight", "bytes", "weight_error", "output_error")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(["" if getattr(row, column) is None else getattr(row, column) for column in columns])
    return out.getvalue()


def model_card(report: Report, model: str) -> str:
    """README.md of the output: what it is, how it was made, how to load it."""
    total = report.totals
    data = report.dataset
    calibrated = f"{data['tokens']:,} tokens of {data['name']}" if data else "none"
    return f"""---
base_model: {model}
library_name: transformers
tags: [compress, quantized]
---
# {model}, {report.recipe.scheme}

Quantised with `compress` {report.versions["compress"]}:

```
{report.command}
```

| | |
|---|---|
| scheme, method | {report.recipe.scheme}, {",".join(report.recipe.methods)} |
| tensors before | {total["bytes_before"]:,} bytes |
| tensors after | {total["bytes_after"]:,} bytes |
| bits per weight, packed linears | {total["bits_per_weight"]:.3f} |
| bits per weight, whole model | {total["bits_per_weight_model"]:.3f} |
| calibration | {calibrated} |
| source sha256 | `{report.source_sha256}` |

{_loaders(report)}{_warnings(report)}Every
layer is listed in `{TABLE}`, every setting and hash in `{REPORT}`. Check it with `compress verify`.
"""


def _warnings(report: Report) -> str:
    """What the run said and the reader of a card has not seen: a list between two paragraphs, or a space."""
    return "\n\n" + "".join(f"- {text}\n" for text in report.warnings) + "\n" if report.warnings else " "


def _loaders(report: Report) -> str:
    """Who reads the output: transformers 5.24 decodes the weights of a rotated linear and leaves its inputs alone."""
    own = sorted({row.scheme for row in report.layers if scheme(row.scheme).own_format})
    if own:
        return f"Load it with `compress_llm.load(directory)`: no other engine reads {' or '.join(own)}."
    if any(row.rotation for row in report.layers):
        return (
            "Its linears rotate their inputs (`transform_config`). Load it with `compress_llm.load(directory)`, or an "
            "engine that\napplies that, such as vLLM; after transformers has loaded it, call "
            "`compressed_tensors.transform.apply_transform_config`."
        )
    engines = "transformers, vLLM or SGLang through `compressed-tensors`"
    if any(row.details.get("input_scale_rule", INPUT_RULES[0]) != INPUT_RULES[0] for row in report.layers):
        engines += ", which choose\nthe scales of inputs by their largest magnitude, not by "
        engines += str(report.recipe.input_scale_rule)
    return f"Load it with `compress_llm.load(directory)`, or with {engines}."
