"""Decoding is timed on the models themselves, each step one token further in its cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compress_llm.compress_cli.runs import bench_decode
from compress_llm.compress_cli.runs.bench_decode import bench_decoding, step
from compress_llm.compress_cli.runs.quantize import quantize
from compress_llm.compress_cli.runs.recipe import Recipe
from compress_llm.formats.checkpoint import Checkpoint
from compress_llm.kernels.load import load

CPU = torch.device("cpu")


def test_both_models_are_measured(tiny_llama: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(bench_decode, "STEPS", 1)
    out = tmp_path / "out"
    quantize(str(tiny_llama), out, Recipe(group_size=32))
    found = bench_decoding(str(out), str(tiny_llama), CPU)
    assert found.packed.stored_bytes == Checkpoint.open(out).nbytes < found.dense.stored_bytes
    assert found.packed.ms_per_token > 0
    assert abs(found.dense.tokens_per_second * found.dense.ms_per_token - 1000) < 1e-6
    assert found.speedup == pytest.approx(found.dense.ms_per_token / found.packed.ms_per_token)
    assert found.packed.peak_bytes is None
    alone = bench_decoding(str(out), None, CPU)
    assert (alone.dense, alone.speedup) == (None, None)


def test_a_step_is_the_model_on_one_more_token(tiny_llama: Path) -> None:
    model = load(tiny_llama, CPU, torch.float32)
    ids = torch.arange(bench_decode.PROMPT_TOKENS).unsqueeze(0)
    repeated = torch.cat([ids, ids[:, -1:].expand(1, bench_decode.WARM_UP + 1)], dim=1)
    last = step(model)().logits[0, -1]
    places = torch.cat([torch.arange(16), torch.full((bench_decode.WARM_UP + 1,), 16)]).unsqueeze(0)
    with torch.no_grad():
        expected = model(input_ids=repeated, position_ids=places).logits[0, -1]
    assert torch.allclose(last, expected, atol=1e-4)
