"""`compress_report.json` read back: what a directory promises of itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...formats.errors import InputError
from .report import REPORT


@dataclass(frozen=True)
class SavedLayer:
    """The promises for one packed linear; `LayerRow` says what they mean."""

    scheme: str
    method: str
    group_size: int | None
    nbytes: int
    weight_error: float
    output_error: float | None
    transformed: bool
    rotation: int | None = None
    input_scale_rule: str | None = None


@dataclass(frozen=True)
class SavedTensor:
    """The promises for one tensor; `dtype` is torch's name without `torch.`."""

    sha256: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class SavedReport:
    """The promises of a directory; `files` maps the other files to their SHA-256."""

    source_sha256: str
    layers: Mapping[str, SavedLayer]
    tensors: Mapping[str, SavedTensor]
    files: Mapping[str, str]
    bytes_after: int


def read_report(directory: Path) -> SavedReport | None:
    """The report in `directory`, None when there is none. Raises InputError when it is damaged."""
    file = directory / REPORT
    if not file.is_file():
        return None
    try:
        data = json.loads(file.read_bytes())
        return SavedReport(
            source_sha256=_text(data["source_sha256"]),
            layers={_text(row["name"]): _layer(row) for row in data["layers"]},
            tensors={name: _tensor(row) for name, row in data["tensors"].items()},
            files={name: _text(digest) for name, digest in data["files"].items()},
            bytes_after=int(data["totals"]["bytes_after"]),
        )
    except (ValueError, OverflowError, RecursionError, KeyError, TypeError, AttributeError) as error:
        cause = f"is not a report ({type(error).__name__}: {error})"
        raise InputError(str(file), cause, "copy the directory again from where it is whole") from error


def _layer(row: Mapping[str, object]) -> SavedLayer:
    group_size, output_error = row["group_size"], row["output_error"]
    rotation, details = row.get("rotation"), row.get("details")
    rule = details.get("input_scale_rule") if isinstance(details, Mapping) else None
    return SavedLayer(
        scheme=_text(row["scheme"]),
        method=_text(row["method"]),
        group_size=None if group_size is None else int(_number(group_size)),
        nbytes=int(_number(row["bytes"])),
        weight_error=_number(row["weight_error"]),
        output_error=None if output_error is None else _number(output_error),
        transformed=row["transformed"] is True,
        rotation=None if rotation is None else int(_number(rotation)),
        input_scale_rule=None if rule is None else _text(rule),
    )


def _tensor(row: Mapping[str, object]) -> SavedTensor:
    shape = row["shape"]
    if not isinstance(shape, list):
        raise TypeError(f"{shape!r} is no shape")
    return SavedTensor(_text(row["sha256"]), _text(row["dtype"]), tuple(int(_number(size)) for size in shape))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is not a number")
    return value
