"""Reports as JSON that any reader takes: what is not known is null, never NaN, and never left out."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import PurePath


def plain(value: object) -> object:
    """`value` as dicts, lists, strings, numbers, booleans and None.

    Takes dataclass instances, mappings, sequences, sets (sorted), paths and numbers; NaN and
    infinities become None. Raises TypeError for anything else, so that no report holds the `repr` of an object.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, PurePath):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return [plain(item) for item in sorted(value)]
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    raise TypeError(f"a report cannot hold {type(value).__name__} {value!r}")


def to_json(value: object) -> str:
    """`value` (see `plain`) as indented ASCII JSON without a final newline; keys keep their order."""
    return json.dumps(plain(value), indent=2, allow_nan=False)
