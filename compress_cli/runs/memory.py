"""How much memory and disk a plan will take, so that a run that cannot finish does not start."""

from __future__ import annotations

import shutil
from pathlib import Path

from ...formats.errors import InputError
from ..units import size_text
from .plan import Plan, Unit

LIBRARIES = 450 << 20
"""Resident size of the interpreter with torch and transformers loaded, before any weight."""
SEARCH = 256 << 20
"""Temporaries of a scale search or a packing, which work in chunks of rows."""


def peak_memory_estimate(plan: Plan, calibrated: bool) -> int:
    """Bytes resident at the worst moment: the largest unit, its float32 working copies, and the calibration states."""
    worst = max((_unit_bytes(plan, unit, calibrated) for unit in plan.units), default=0)
    states = 0
    if calibrated:
        recipe = plan.recipe
        hidden, inner = (_size(plan, key) for key in ("hidden_size", "intermediate_size"))
        tokens = recipe.num_samples * recipe.seq_len
        states = tokens * (2 * hidden * 2 + 4 * max(hidden, inner))
        states += recipe.batch_size * recipe.seq_len * 4 * (4 * hidden + 3 * inner)
        embedding = plan.checkpoint.tensors.get(f"{plan.architecture.embedding}.weight")
        worst = max(worst, 3 * embedding.nbytes if embedding else 0)
    return LIBRARIES + SEARCH + worst + states


def _size(plan: Plan, key: str) -> int:
    """A size from the config, 0 where it has none."""
    value = plan.checkpoint.config.get(key)
    return value if isinstance(value, int) else 0


def _unit_bytes(plan: Plan, unit: Unit, calibrated: bool) -> int:
    if not any(layer.scheme for layer in unit.layers):
        return 0
    largest = max((layer.weights for layer in unit.layers if layer.scheme), default=0)
    packed = sum(layer.bytes_after for layer in unit.layers if layer.scheme)
    work = 4 * 4 * largest + packed
    if not calibrated:
        return work
    names = {*unit.kept, *(layer.source for layer in unit.layers)}
    stored = sum(plan.checkpoint.tensors[name].nbytes for name in names)
    widest = max((layer.shape[1] for layer in unit.layers if layer.scheme), default=0)
    return work + 5 * stored + 3 * 4 * widest * widest


def check_memory(estimate: int, limit: int | None) -> None:
    """Raise InputError when the estimate is over what `--max-memory` allows."""
    if limit is not None and estimate > limit:
        raise InputError(
            f"--max-memory {size_text(limit)}",
            f"this run needs about {size_text(estimate)}",
            "allow more, or lower --num-samples, --seq-len or --batch-size",
        )


def check_disk(out: Path, needed: int) -> None:
    """Raise InputError when the file system of `out` has no room for the parts and the shards made from them."""
    place = out.absolute().parent
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < 2 * needed:
        raise InputError(
            f"-o {out}",
            f"needs {size_text(2 * needed)} while it is written and {place} has {size_text(free)} free",
            "free some space or choose another place",
        )
