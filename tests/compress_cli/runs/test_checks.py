"""The parts of the checks that no damaged directory reaches; the rest is in test_verify.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compress_llm.compress_cli.runs import checks
from compress_llm.compress_cli.runs.checks import check, decode_faults
from compress_llm.compress_cli.runs.stored import Packed
from compress_llm.formats.checkpoint import TensorInfo
from compress_llm.formats.packings import packing
from compress_llm.formats.rounded import QParams, Rounded
from compress_llm.formats.scheme import scheme

INT4 = scheme("W4A16_ASYM").with_group(16)


def rounded() -> Rounded:
    codes = torch.randint(-8, 8, (10, 32), dtype=torch.int8)
    zeros = torch.randint(-8, 8, (10, 2), dtype=torch.int8)
    return Rounded(INT4, codes, QParams(torch.rand(10, 2).add(0.1).bfloat16(), zeros))


def test_a_check_shows_the_first_faults_and_counts_the_rest() -> None:
    assert check("name", [], "all seen").detail == "all seen"
    found = check("name", ["a", "b", "c", "d", "e"], "all seen")
    assert (found.passed, found.detail) == (False, "a; b; c, and 2 more")


@pytest.mark.parametrize("rows", [1, 3, 10])
def test_two_decoders_that_differ_in_one_bit_are_told(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    tensors = packing(INT4).pack(rounded())
    infos = {
        suffix: TensorInfo(f"a.{suffix}", tensor.dtype, tuple(tensor.shape), tensor.nbytes, Path(), 0)
        for suffix, tensor in tensors.items()
    }
    packed = Packed("a", INT4, (10, 32), infos)
    monkeypatch.setattr(checks, "rows_at_a_time", lambda _columns: rows)
    assert decode_faults(packed, tensors) == []
    real = checks.decode_rows

    def off_by_a_bit(given: dict, row: object, shape: tuple, start: int, stop: int) -> torch.Tensor:
        values = real(given, row, shape, start, stop)
        if start <= 4 < stop:
            values[4 - start, 7:8].view(torch.int16).bitwise_xor_(1)
        return values

    monkeypatch.setattr(checks, "decode_rows", off_by_a_bit)
    assert "two different weights" in decode_faults(packed, tensors)[0]
    del tensors["weight_scale"]
    assert "'a' does not decode" in decode_faults(packed, tensors)[0]
