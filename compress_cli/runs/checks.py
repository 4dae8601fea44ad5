"""The single checks of a stored directory against its own report; `verify.py` puts them in order.

Each looks at one promise and finds every breach of it, so that the answer to damage is a list and not the first item.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ...formats.checkpoint import Checkpoint
from ...formats.errors import InputError
from ...formats.progress import Track
from ...formats.scheme import Scheme, scheme
from ...formats.tensor_bytes import chunks, sha256_of_file
from ...kernels.reference import decode_rows
from .report import CARD
from .saved_report import SavedReport
from .stored import Packed, is_finite, packed_linear, packed_names, rows_at_a_time, schemes

SHOWN = 3
EDITABLE = (CARD,)  # the model card is there to be edited
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


@dataclass(frozen=True)
class Check:
    """One promise: whether it is kept, and what was looked at or found."""

    name: str
    passed: bool
    detail: str


def check(name: str, faults: Sequence[str], seen: str) -> Check:
    """Passed with what was `seen` when there are no `faults`, else failed with the first few of them."""
    if not faults:
        return Check(name, True, seen)
    rest = f", and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
    return Check(name, False, "; ".join(faults[:SHOWN]) + rest)


def check_files(directory: Path, report: SavedReport, track: Track) -> Check:
    """Every other file is as it was written, and no weight file is there that nobody wrote."""
    faults = []
    promised = {name: digest for name, digest in report.files.items() if name not in EDITABLE}
    for name in track(sorted(promised), "hashing files", len(promised)):
        file = directory / name
        if not file.is_file():
            faults.append(f"{name} is missing")
        elif sha256_of_file(file) != promised[name]:
            faults.append(f"{name} has changed")
    names = sorted(file.name for file in directory.iterdir() if file.suffix in WEIGHT_SUFFIXES)
    faults += [f"{name} is a stray weight file" for name in names if name not in promised]
    return check("files", faults, f"{len(promised)} files hashed")


def check_names(checkpoint: Checkpoint, report: SavedReport) -> Check:
    """Every tensor that was promised, and no strays."""
    missing = sorted(report.tensors.keys() - checkpoint.tensors.keys())
    strays = sorted(checkpoint.tensors.keys() - report.tensors.keys())
    faults = [f"'{name}' is missing" for name in missing] + [f"'{name}' is a stray" for name in strays]
    return check("tensors", faults, f"{len(checkpoint.tensors)} tensors, none missing, no strays")


def check_layout(checkpoint: Checkpoint, report: SavedReport) -> Check:
    """Shapes, dtypes, and the sums of bytes."""
    faults = []
    for name, promised in report.tensors.items():
        info = checkpoint.tensors.get(name)
        if info is not None:
            dtype = str(info.dtype).removeprefix("torch.")
            if (dtype, info.shape) != (promised.dtype, promised.shape):
                was = f"{promised.dtype} {list(promised.shape)}"
                faults.append(f"'{name}' is {dtype} {list(info.shape)}, the report says {was}")
    if checkpoint.nbytes != report.bytes_after:
        faults.append(f"the tensors take {checkpoint.nbytes} bytes, the report says {report.bytes_after}")
    return check("shapes and dtypes", faults, f"{checkpoint.nbytes:,} bytes of tensors")


def check_contents(checkpoint: Checkpoint, report: SavedReport, track: Track) -> list[Check]:
    """The SHA-256 of every tensor, and that none holds NaN or Inf; both in one pass over the bytes."""
    changed, not_finite = [], []
    names = sorted(checkpoint.tensors.keys() & report.tensors.keys())
    for name in track(names, "hashing tensors", len(names)):
        info = checkpoint.tensors[name]
        digest, finite = hashlib.sha256(), True
        for chunk in chunks(info):
            digest.update(chunk)
            finite = finite and is_finite(torch.frombuffer(chunk, dtype=info.dtype))
        if digest.hexdigest() != report.tensors[name].sha256:
            changed.append(f"'{name}' has changed")
        if not finite:
            not_finite.append(f"'{name}' holds NaN or Inf")
    return [
        check("hashes", changed, f"{len(names)} tensors hashed"),
        check("finite", not_finite, f"no NaN or Inf in {len(names)} tensors"),
    ]


def check_config(checkpoint: Checkpoint, report: SavedReport) -> tuple[Check, list[Packed]]:
    """config.json, report and stored tensors agree on what is packed and how; the linears on which they do."""
    name = "quantization_config"
    try:
        said = schemes(checkpoint)
    except InputError as error:
        return check(name, [str(error)], ""), []
    faults, agreed = [], []
    for linear in sorted(said.keys() | report.layers.keys() | packed_names(checkpoint)):
        try:
            fault = _disagreement(linear, said.get(linear), report)
            packed = packed_linear(checkpoint, linear, said[linear]) if fault is None else None
        except InputError as error:
            fault, packed = str(error), None
        if packed is not None and packed.nbytes != report.layers[linear].nbytes:
            fault = f"'{linear}' takes {packed.nbytes} bytes, the report says {report.layers[linear].nbytes}"
        if fault is not None:
            faults.append(fault)
        if packed is not None:
            agreed.append(packed)
    return check(name, faults, f"{len(agreed)} packed linears, as the report says"), agreed


def _disagreement(linear: str, said: Scheme | None, report: SavedReport) -> str | None:
    row = report.layers.get(linear)
    if said is None or row is None:
        where = "config.json" if said is None else "the report"
        return f"'{linear}' is not packed according to {where}"
    wanted = replace(scheme(row.scheme), name=said.name, symmetric=said.symmetric, rotation=row.rotation)
    wanted = wanted.with_input_rule(row.input_scale_rule, f"{linear} input_scale_rule")
    if wanted.sparsity is not None and said.sparsity is not None:  # the ratio and the layout are the recipe's
        wanted = replace(wanted, sparsity=said.sparsity, packing=said.packing)
    if None not in (said.input_rule, wanted.input_rule) and said.input_rule != wanted.input_rule:
        rules = f"by {said.input_rule} in config.json and by {wanted.input_rule} in the report"
        return f"'{linear}' takes the scales of its inputs {rules}"
    if wanted.with_group(row.group_size) != said:
        size = said.group_size or "channel"
        was = f"{row.scheme}, group {row.group_size or 'channel'}"
        return f"'{linear}' is {said.name}, group {size}, in config.json and {was} in the report"
    return None


def decode_faults(packed: Packed, tensors: Mapping[str, Tensor]) -> list[str]:
    """What is wrong with one packed linear: it does not decode, two decoders differ in a bit, or a value is not finite.

    The decoder of `formats` and the reference of `kernels` share no unpacking code.
    """
    try:
        rounded = packed.unpack(tensors)
    except InputError as error:
        return [f"'{packed.name}' does not decode: {error}"]
    rows, columns = packed.shape
    step = rows_at_a_time(columns)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        theirs = decode_rows(tensors, packed.scheme, packed.shape, start, stop)
        ours = rounded.rows(start, stop).dequantize().to(theirs.dtype)
        if not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
            return [f"'{packed.name}' decodes to two different weights, between rows {start} and {stop - 1}"]
        if not is_finite(ours):
            return [f"'{packed.name}' decodes to NaN or Inf, between rows {start} and {stop - 1}"]
    return []
