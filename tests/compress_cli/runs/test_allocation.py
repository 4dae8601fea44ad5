"""Ratios of their own for sparse layers, from a pass over the dense model."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from compress_llm.compress_cli.runs.allocation import _Loss
from compress_llm.compress_cli.runs.job import prepare
from compress_llm.compress_cli.runs.quantize import quantize
from compress_llm.compress_cli.runs.recipe import Recipe, Rule
from compress_llm.formats.errors import InputError

TEXT = Path(__file__).with_name("calibration.txt")
SMALL_RUN = {"num_samples": 3, "seq_len": 16, "batch_size": 2, "dataset": str(TEXT)}


@pytest.mark.parametrize("rule", ["owl", "error"])
def test_layers_differ_and_the_average_is_the_recipes(
    rule: str, save_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = save_model("Llama")
    recipe = Recipe(scheme="SPARSE50", method="wanda", allocate=rule, sparsity=0.4, **SMALL_RUN)
    report = quantize(str(model), tmp_path / "out", recipe)
    sizes = {layer.name: layer.weights for layer in prepare(str(model), recipe).plan.quantized}
    ratios = {row.name: row.details["sparsity"] for row in report.layers}
    assert len(set(ratios.values())) > 1
    average = sum(ratios[name] * size for name, size in sizes.items()) / sum(sizes.values())
    assert average == pytest.approx(0.4, abs=0.005)  # rows keep whole numbers of weights


def test_rules_with_another_ratio_leave_no_average_to_keep(save_model: Callable[..., Path], tmp_path: Path) -> None:
    model = save_model("Llama")
    recipe = Recipe(scheme="W8A16", method="wanda,rtn", allocate="owl", **SMALL_RUN)
    with pytest.raises(InputError, match="no scheme of this recipe is sparse"):
        prepare(str(model), recipe)
    mixed = Recipe(
        scheme="SPARSE50",
        method="wanda",
        allocate="owl",
        sparsity=0.6,
        rules=(Rule("down_proj", "SPARSE50"),),
        **SMALL_RUN,
    )
    with pytest.raises(InputError, match="--allocate owl: needs text and one ratio"):
        quantize(str(model), tmp_path / "out", mixed)
    assert list(tmp_path.iterdir()) == []


def test_every_token_counts_by_its_own_length() -> None:
    whole, other = torch.tensor([[[300.0, 400.0], [3.0, 4.0]]]), torch.tensor([[[300.0, 400.0], [3.0, 3.0]]])
    looks = iter([[whole], [other]])
    stream = SimpleNamespace(look=lambda block: next(looks), update=lambda block, weights: None)
    loss = _Loss(stream, None)  # pyright: ignore[reportArgumentType]
    assert loss({}) == pytest.approx(math.sqrt((0 + 1 / 25) / 2))
