"""Checks of a packed directory against the model it was made from: what hashes cannot know.

A hash in the report proves that nothing changed since, not that it was right. With the source at hand the error of
every packed weight is computed again from the stored bytes, and must be the one in the report.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ...formats.architectures import Architecture, architecture
from ...formats.checkpoint import Checkpoint
from ...formats.progress import Track
from ...formats.tensor_bytes import sha256_of
from ...kernels.hadamard import rotated
from .checks import Check, check
from .saved_report import SavedReport
from .stored import Packed, rows_at_a_time

TOLERANCE = 1e-9  # of a weight error: it is the same float32 arithmetic, summed in float64
FLOOR = 1e-12  # below this an error counts as none
FIT_STEPS = 8
FIT_TOLERANCE = 1e-3


class Source:
    """The original of a packed directory, opened once, with the names its tensors have there."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.facts: Architecture = architecture(
            checkpoint.config, {name: info.shape for name, info in checkpoint.tensors.items()}
        )

    def weight_name(self, linear: str) -> str | None:
        """The tensor that holds the weight of `linear`; for a tied head the embedding's; None when there is none."""
        own, shared = f"{linear}.weight", f"{self.facts.embedding}.weight"
        if own in self.checkpoint.tensors:
            return own
        return shared if linear == self.facts.head and shared in self.checkpoint.tensors else None

    def block(self, tensor: str) -> int | None:
        """Number of the decoder block that `tensor` belongs to."""
        place = self.facts.split(tensor)
        return None if place is None else place[0]


def check_source(source: Source, report: SavedReport, track: Track) -> Check:
    """The reference is the model that the report names."""
    digest = source.checkpoint.sha256(track)
    faults = []
    if digest != report.source_sha256:
        faults = [f"the reference has SHA-256 {digest}, the report was made from {report.source_sha256}"]
    return check("source", faults, digest)


def check_settings(source: Source, config: Mapping[str, object]) -> Check:
    """config.json says of the model what the source's says; only how weights are stored may differ."""
    added = {"quantization_config", "tie_word_embeddings"}
    before = source.checkpoint.config
    keys = sorted((before.keys() | config.keys()) - added)
    faults = [
        f"'{key}' is {config.get(key)!r}, not {before.get(key)!r}" for key in keys if config.get(key) != before.get(key)
    ]
    return check("settings", faults, f"{len(keys)} settings as in the source")


def check_kept(source: Source, report: SavedReport, packed: list[Packed], track: Track) -> Check:
    """What is not packed is the source's, byte for byte, and nothing of the source is lost.

    Blocks that a transform rescaled are left out: their norms and plain linears carry part of the scale.
    """
    weights = {source.weight_name(linear.name) for linear in packed}
    stored = {info.name for linear in packed for info in linear.tensors.values()}
    rescaled = {source.block(f"{name}.weight") for name, row in report.layers.items() if row.transformed} - {None}
    kept = report.tensors.keys() - stored
    faults = [f"'{name}' is lost" for name in sorted(source.checkpoint.tensors.keys() - kept - weights)]
    names = sorted(name for name in kept if source.block(name) not in rescaled)
    for name in track(names, "comparing tensors", len(names)):
        info = source.checkpoint.tensors.get(name)
        if info is None:
            faults.append(f"'{name}' is not in the reference")
        elif sha256_of(info) != report.tensors[name].sha256:
            faults.append(f"'{name}' differs from the reference")
    return check("kept tensors", faults, f"{len(names)} of {len(kept)} compared with the reference")


def weight_faults(source: Source, packed: Packed, tensors: Mapping[str, Tensor], report: SavedReport) -> list[str]:
    """Whether the error of one packed weight is another than the report says. `tensors` decode (`decode_faults`)."""
    name = source.weight_name(packed.name)
    if name is None:
        return [f"'{packed.name}.weight' is not in the reference"]
    if source.checkpoint.tensors[name].shape != packed.shape:
        shape = list(source.checkpoint.tensors[name].shape)
        return [f"'{packed.name}' is {list(packed.shape)} and the reference has {shape}"]
    row = report.layers[packed.name]
    weight = rotated(source.checkpoint.read(name).float(), packed.scheme)
    rounded = packed.unpack(tensors)
    step = rows_at_a_time(packed.shape[1])
    cuts = [(start, min(packed.shape[0], start + step)) for start in range(0, packed.shape[0], step)]
    error = relative_error((weight[a:b], rounded.rows(a, b).dequantize()) for a, b in cuts)
    if abs(error - row.weight_error) <= TOLERANCE * row.weight_error + FLOOR:
        return []
    if not row.transformed:
        return [f"'{packed.name}' has weight error {error:.9g}, the report says {row.weight_error:.9g}"]
    residual = rescaled_error(rotated(weight, packed.scheme), rotated(rounded.dequantize(), packed.scheme))
    bound = math.inf if row.weight_error >= 1 else row.weight_error / (1 - row.weight_error)
    if residual <= bound * (1 + FIT_TOLERANCE) + FLOOR:
        return []
    cause = f"is {residual:.6g} away from any rescaling of the reference, the report allows {bound:.6g}"
    return [f"'{packed.name}' {cause}"]


def relative_error(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """‖W − Ŵ‖ / ‖W‖ over pairs of rows of W and Ŵ (float32), summed in float64; 0 for a weight that is all zeros."""
    error, norm = 0.0, 0.0
    for weight, decoded in pairs:
        error += float((weight - decoded).double().square().sum())
        norm += float(weight.double().square().sum())
    return math.sqrt(error / norm) if norm > 0 else 0.0


def rescaled_error(weight: Tensor, decoded: Tensor) -> float:
    """min ‖Ŵ − diag(r) W diag(s)‖ / ‖Ŵ‖ over scales r of the rows and s of the columns, by alternating least squares.

    Transforms fold such scales, and do not say which; a weight that was rounded to relative error e after them is at
    most e / (1 - e) away from W in this measure. `weight` and `decoded` are float32 [out, in].
    """
    norm = float(decoded.double().square().sum())
    if norm == 0:
        return 0.0
    fitted = weight
    for _ in range(FIT_STEPS):
        for dim in (0, 1):
            square = fitted.square().sum(dim, keepdim=True)
            scale = (fitted * decoded).sum(dim, keepdim=True) / square
            fitted = fitted * torch.where(square > 0, scale, 0.0)
    return math.sqrt(float((decoded - fitted).double().square().sum()) / norm)
