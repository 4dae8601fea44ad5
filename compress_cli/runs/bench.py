"""What packed weights are worth on this machine: products against dense ones, decoding end to end, floors beside both.

Shapes and schemes are those of a packed directory, with linears that run as one product merged, or those asked for.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from ...calibration.embedded import model_directory
from ...formats.architectures import architecture
from ...formats.checkpoint import Checkpoint, resolve
from ...formats.errors import InputError
from ...formats.progress import Track, silent
from ...formats.scheme import scheme
from ...kernels.lowbit.packed import misfit
from ...kernels.sparse_linear import fits
from .bench_decode import Decoding, bench_decoding
from .bench_kernels import Cell, Kind, bench_kernels
from .device import pick_device
from .stored import packed_linear, schemes
from .timing import limits
from .tune import Tuned, tune

DEFAULT_SCHEMES = ("W4A16",)
GPU_SHAPES = ("14336x4096", "4096x14336", "8192x8192")
CPU_SHAPES = ("1024x1024",)
GPU_TOKENS, CPU_TOKENS = (1, 4, 8, 16, 32, 64, 256, 1024, 4096), (1, 16)


@dataclass(frozen=True)
class Bench:
    """What `bench --json` prints. Bandwidth in bytes and product in operations a second, as measured here."""

    device: str
    torch: str
    bytes_per_second: float
    operations_per_second: float
    kernels: list[Cell]
    decoding: Decoding | None
    tuned: list[Tuned] = field(default_factory=list)


def bench(
    directory: str | Path | None = None,
    *,
    reference: str | None = None,
    scheme_names: Sequence[str] = (),
    group_size: int | Literal["channel"] | None = None,
    shapes: Sequence[str] = (),
    tokens: Sequence[int] = (),
    device: str = "auto",
    search: bool = False,
    track: Track = silent,
) -> Bench:
    """Measure on `device` the linears of a packed `directory` and its decoding, against `reference` if given.

    Without a directory: every scheme named, with `group_size` where it is given, on weights of `shapes` ("OUTxIN").
    `search` looks for faster configurations first, and keeps them. Raises InputError for what does not fit together.
    """
    place = pick_device(device)
    on_gpu = place.type == "cuda"
    if directory is None:
        named = [scheme(name) for name in scheme_names or DEFAULT_SCHEMES]
        sized = named if group_size is None else [row.with_group(group_size) for row in named]
        for row in sized:
            if (reason := misfit(row)) is not None and not fits(row):
                raise InputError(f"--scheme {row.name}", f"has no kernel to measure: {reason}", "name another scheme")
        kinds = [(row, shape(text)) for row in sized for text in shapes or (GPU_SHAPES if on_gpu else CPU_SHAPES)]
        if reference is not None:
            raise InputError("--reference", "nothing to compare it with", "name the packed directory too")
    else:
        for flag, given in (("--scheme", scheme_names), ("--group-size", group_size), ("--shape", shapes)):
            if given:
                raise InputError(flag, f"the linears of {directory} say it", f"leave out {flag} or the directory")
        kinds = kinds_of(Checkpoint.open(resolve(str(directory))))
        if reference is not None:
            model_directory(reference, "--reference")  # what is not there is said before minutes of measuring
    for row, size in kinds:
        if row.group_size is not None and size[1] % row.group_size:
            cause = f"is not divided by the groups of {row.group_size} of {row.name}"
            raise InputError(f"--shape {size[0]}x{size[1]}", cause, "give another shape, or --group-size")
    counts = tuple(tokens) or (GPU_TOKENS if on_gpu else CPU_TOKENS)
    can = limits(place)
    tuned = list(tune(kinds, counts, place, track)) if search else []
    return Bench(
        device=torch.cuda.get_device_properties(place).name if on_gpu else platform.processor() or platform.machine(),
        torch=torch.__version__,
        bytes_per_second=can.bytes_per_second,
        operations_per_second=can.operations_per_second,
        kernels=list(bench_kernels(kinds, counts, place, can, track)),
        decoding=None if directory is None else bench_decoding(str(directory), reference, place),
        tuned=tuned,
    )


def shape(text: str) -> tuple[int, int]:
    """(out, in) from "OUTxIN". Raises InputError for another text."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise InputError(f"--shape {text}", "is no shape of a weight", "write it as OUTxIN, such as 14336x4096")
    return int(match[1]), int(match[2])


def kinds_of(checkpoint: Checkpoint) -> list[Kind]:
    """Schemes and shapes of the products that the packed linears of a directory run as, each once.

    Raises InputError for a directory without packed linears that a kernel is there for.
    """
    facts = architecture(checkpoint.config, {name: info.shape for name, info in checkpoint.tensors.items()})
    said = schemes(checkpoint)
    found: dict[Kind, None] = {}
    for name, row in said.items():
        out_features, in_features = packed_linear(checkpoint, name, row).shape
        where = facts.split(name)
        stem = name.removesuffix(where[1]) if where else ""
        together = tuple(stem + inner for inner in facts.fused_with(where[1])) if where else (name,)
        if len(together) > 1 and all(said.get(other) == row for other in together):
            out_features = sum(packed_linear(checkpoint, other, row).shape[0] for other in together)
        if misfit(row) is None or fits(row):
            found[row, (out_features, in_features)] = None
    if not found:
        raise InputError(str(checkpoint.directory), "has no packed linears to measure", "name an output of quantize")
    return list(found)
