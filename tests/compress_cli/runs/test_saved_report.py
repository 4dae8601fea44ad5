"""A report is read as it was written, or said to be damaged."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from compress_llm.compress_cli.runs.saved_report import SavedLayer, SavedTensor, read_report
from compress_llm.formats.errors import InputError

LAYER = {"scheme": "W4A16", "method": "rtn", "group_size": None, "bytes": 9, "weight_error": 0.1, "output_error": None}
REPORT: dict[str, Any] = {
    "source_sha256": "ab",
    "layers": [{"name": "a", **LAYER, "transformed": False}],
    "tensors": {"a.weight": {"sha256": "cd", "dtype": "int8", "shape": [3, 3]}},
    "files": {"config.json": "ef"},
    "totals": {"bytes_after": 9},
}


def saved(folder: Path, report: object) -> Path:
    (folder / "compress_report.json").write_text(json.dumps(report))
    return folder


def test_reads_what_was_written(tmp_path: Path) -> None:
    report = read_report(saved(tmp_path, REPORT))
    assert report is not None
    assert report.layers == {"a": SavedLayer("W4A16", "rtn", None, 9, 0.1, None, False)}
    assert report.tensors == {"a.weight": SavedTensor("cd", "int8", (3, 3))}
    assert (report.source_sha256, report.files, report.bytes_after) == ("ab", {"config.json": "ef"}, 9)


def test_no_report(tmp_path: Path) -> None:
    assert read_report(tmp_path) is None


@pytest.mark.parametrize("path", ["source_sha256", "layers", "tensors", "files", "totals"])
@pytest.mark.parametrize("value", [None, 3, "x", [1], {"x": None}])
def test_anything_else_is_damage(tmp_path: Path, path: str, value: object) -> None:
    if (path, value) == ("source_sha256", "x"):
        return
    with pytest.raises(InputError, match="is not a report"):
        read_report(saved(tmp_path, {**REPORT, path: value}))


@pytest.mark.parametrize("key", ["name", "scheme", "group_size", "bytes", "weight_error", "transformed"])
def test_a_layer_without_a_field_is_damage(tmp_path: Path, key: str) -> None:
    report = copy.deepcopy(REPORT)
    del report["layers"][0][key]
    with pytest.raises(InputError, match=key):
        read_report(saved(tmp_path, report))
