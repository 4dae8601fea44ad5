"""What is in a model directory, packed or plain: per linear its scheme, bits and bytes. Also `compress_llm.inspect`.

Headers only, so it answers at once whatever the size. A report beside the weights adds method and errors; directories
of other tools in a layout of compressed-tensors are shown as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...formats.checkpoint import Checkpoint, TensorInfo, resolve
from ...formats.errors import InputError
from .saved_report import SavedLayer, read_report
from .stored import Packed, packed_linear, packed_names, schemes


@dataclass(frozen=True)
class LayerView:
    """One matrix of the model. `scheme` is None for one that is stored plain, `dtype` that of its scales or elements.

    `group_size` None is one scale a row. `bits_per_weight` counts scales and zero points. `rotation` is the number of
    inputs mixed before the product, `input_scale_rule` how scales of the inputs are chosen where there is a choice.
    `method`, `weight_error` and `output_error` are the report's, None where it does not say.
    """

    name: str
    scheme: str | None
    group_size: int | None
    shape: tuple[int, ...]
    dtype: str
    bits_per_weight: float
    bytes: int
    method: str | None = None
    weight_error: float | None = None
    output_error: float | None = None
    rotation: int | None = None
    input_scale_rule: str | None = None


@dataclass(frozen=True)
class Totals:
    """Sums over the directory: `rest_bytes` are norms, biases and other tensors without a row of their own.

    `bits_per_weight` is over packed linears (None without any), `bits_per_weight_model` over all parameters.
    """

    bytes: int
    rest_bytes: int
    parameters: int
    packed_layers: int
    bits_per_weight: float | None
    bits_per_weight_model: float


@dataclass(frozen=True)
class Inspection:
    """What `inspect --json` prints. `format` is that of `quantization_config`, None for a plain model."""

    directory: str
    model_type: str | None
    format: str | None
    layers: list[LayerView]
    totals: Totals
    warnings: list[str]


def inspect(directory: str | Path) -> Inspection:
    """Look into `directory` (or the id of a model in the local Hub cache). Reads headers only.

    A quantisation that is not read here is a warning, and its tensors are shown as they are stored. So is each linear
    whose tensors are not those that config.json asks for. Raises InputError for what is no model directory.
    """
    checkpoint = Checkpoint.open(resolve(str(directory)))
    warnings = list(checkpoint.warnings)
    promised = _promises(checkpoint, warnings)
    packed = _packed(checkpoint, warnings)
    inside = {info.name for linear in packed for info in linear.tensors.values()}
    plain = [info for name, info in checkpoint.tensors.items() if name not in inside]
    rows = [_packed_row(linear, promised.get(linear.name)) for linear in packed]
    rows += [_plain_row(info) for info in plain if len(info.shape) >= 2]
    rows.sort(key=lambda row: [(int(part), "") if part.isdecimal() else (-1, part) for part in row.name.split(".")])
    return Inspection(
        directory=str(directory),
        model_type=checkpoint.config.get("model_type"),
        format=None if checkpoint.quantization is None else _format(checkpoint.quantization),
        layers=rows,
        totals=_totals(checkpoint, packed, plain, sum(row.bytes for row in rows)),
        warnings=warnings,
    )


def _promises(checkpoint: Checkpoint, warnings: list[str]) -> Mapping[str, SavedLayer]:
    try:
        report = read_report(checkpoint.directory)
    except InputError as error:
        warnings.append(str(error))
        return {}
    return {} if report is None else report.layers


def _packed(checkpoint: Checkpoint, warnings: list[str]) -> list[Packed]:
    try:
        known = schemes(checkpoint)
    except InputError as error:
        warnings.append(str(error))
        return []
    found = []
    for name in sorted(known.keys() & packed_names(checkpoint)):
        try:
            linear = packed_linear(checkpoint, name, known[name])
            found.append(linear)
            linear.check()
        except InputError as error:
            warnings.append(str(error))
    return found


def _format(quantization: Mapping[str, object]) -> str:
    return str(quantization.get("format") or quantization.get("quant_method") or "unknown")


def _packed_row(linear: Packed, promised: SavedLayer | None) -> LayerView:
    return LayerView(
        name=linear.name,
        scheme=linear.scheme.name if promised is None else promised.scheme,
        group_size=linear.scheme.group_size,
        shape=linear.shape,
        dtype=str(linear.dtype).removeprefix("torch."),
        bits_per_weight=linear.bits_per_weight,
        bytes=linear.nbytes,
        method=None if promised is None else promised.method,
        weight_error=None if promised is None else promised.weight_error,
        output_error=None if promised is None else promised.output_error,
        rotation=linear.scheme.rotation,
        input_scale_rule=linear.scheme.input_rule,
    )


def _plain_row(info: TensorInfo) -> LayerView:
    dtype = str(info.dtype).removeprefix("torch.")
    name = info.name.removesuffix(".weight")
    return LayerView(name, None, None, info.shape, dtype, 8.0 * info.dtype.itemsize, info.nbytes)


def _totals(checkpoint: Checkpoint, packed: list[Packed], plain: list[TensorInfo], shown: int) -> Totals:
    weights = sum(math.prod(linear.shape) for linear in packed)
    parameters = weights + sum(math.prod(info.shape) for info in plain)
    return Totals(
        bytes=checkpoint.nbytes,
        rest_bytes=checkpoint.nbytes - shown,
        parameters=parameters,
        packed_layers=len(packed),
        bits_per_weight=8 * sum(linear.nbytes for linear in packed) / weights if weights else None,
        bits_per_weight_model=8 * checkpoint.nbytes / max(1, parameters),
    )
