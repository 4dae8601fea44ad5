"""What is measured: the products of a directory, merged as they run, or what was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress_llm.compress_cli.runs import bench as module
from compress_llm.compress_cli.runs.bench import bench, kinds_of, shape
from compress_llm.compress_cli.runs.plain_json import to_json
from compress_llm.compress_cli.runs.quantize import quantize
from compress_llm.compress_cli.runs.recipe import Recipe
from compress_llm.compress_cli.runs.timing import Limits
from compress_llm.formats.checkpoint import Checkpoint
from compress_llm.formats.errors import InputError


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "limits", lambda device: Limits(1e10, 1e11))


def packed(tiny_llama: Path, out: Path, **recipe: object) -> Path:
    quantize(str(tiny_llama), out, Recipe(group_size=32, **recipe))
    return out


def test_linears_that_run_together_are_one_shape(tiny_llama: Path, tmp_path: Path) -> None:
    found = kinds_of(Checkpoint.open(packed(tiny_llama, tmp_path / "out")))
    assert {size for _, size in found} == {(128, 64), (64, 64), (192, 64), (64, 96)}


def test_those_without_all_their_partners_are_not(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, schemes = packed(tiny_llama, tmp_path / "out"), module.schemes
    monkeypatch.setattr(module, "schemes", lambda found: {n: row for n, row in schemes(found).items() if "k_" not in n})
    assert {size for _, size in kinds_of(Checkpoint.open(out))} == {(64, 64), (32, 64), (192, 64), (64, 96)}


def test_what_was_asked_for(tiny_llama: Path) -> None:
    result = bench(scheme_names=["W4A16", "W8A16"], group_size=32, shapes=["40x96"], tokens=[1, 2], device="cpu")
    assert [(cell.scheme, cell.group_size, cell.tokens) for cell in result.kernels] == [
        ("W4A16", 32, 1),
        ("W4A16", 32, 2),
        ("W8A16", 32, 1),
        ("W8A16", 32, 2),
    ]
    assert (result.decoding, result.tuned) == (None, [])
    assert to_json(result)


def test_sparse_weights_are_measured_by_their_ratio(tiny_llama: Path, tmp_path: Path) -> None:
    asked = bench(scheme_names=["SPARSE50"], shapes=["96x128"], tokens=[2], device="cpu").kernels
    assert [(cell.scheme, cell.tokens, cell.passed) for cell in asked] == [("SPARSE50", 2, True)]
    quantize(str(tiny_llama), tmp_path / "out", Recipe(scheme="SPARSE50", method="magnitude", sparsity=0.7))
    kinds = kinds_of(Checkpoint.open(tmp_path / "out"))
    assert {(row.sparsity.ratio, size) for row, size in kinds if row.sparsity} == {
        (0.7, size) for size in ((128, 64), (64, 64), (192, 64), (64, 96))
    }


@pytest.mark.parametrize("text", ["", "4096", "0x4", "4x-1", "4 x 4"])
def test_other_shapes_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="OUTxIN"):
        shape(text)


def test_what_does_not_fit_together_is_said(tiny_llama: Path) -> None:
    with pytest.raises(InputError, match="name the packed directory"):
        bench(reference="embedded", device="cpu")
    with pytest.raises(InputError, match="leave out --shape or the directory"):
        bench(tiny_llama, shapes=["8x8"], device="cpu")
    with pytest.raises(InputError, match="no packed linears"):
        bench(tiny_llama, device="cpu")
    with pytest.raises(InputError, match="--shape 8x100: .* groups of 128 of W4A16"):
        bench(shapes=["8x100"], device="cpu")
    with pytest.raises(InputError, match="--scheme W4A16: has no kernel to measure"):
        bench(scheme_names=["W4A16"], group_size=16, device="cpu")


def test_an_original_that_is_not_there_is_said_before_measuring(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(module, "limits")  # the first thing that is measured
    with pytest.raises(InputError, match="/nowhere"):
        bench(packed(tiny_llama, tmp_path / "out"), reference="/nowhere", device="cpu")
