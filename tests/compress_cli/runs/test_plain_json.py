"""Reports hold plain values only, and null for what is not known."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from compress_llm.compress_cli.runs.plain_json import plain, to_json


@dataclass
class Row:
    name: str
    error: float


def test_everything_that_a_report_may_hold() -> None:
    value = {"rows": (Row("a", 0.5), Row("b", float("nan"))), 1: {2, 1}, "path": Path("x/y"), "on": True, "none": None}
    assert json.loads(to_json(value)) == {
        "rows": [{"name": "a", "error": 0.5}, {"name": "b", "error": None}],
        "1": [1, 2],
        "path": "x/y",
        "on": True,
        "none": None,
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), np.float64("nan")])
def test_what_is_no_number_is_null(value: float) -> None:
    assert to_json([value]) == "[\n  null\n]"


def test_names_outside_ascii_survive_any_terminal() -> None:
    text = to_json("\udcff é")
    assert text.isascii()
    assert json.loads(text) == "\udcff é"


def test_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="object"):
        plain({"a": object()})
