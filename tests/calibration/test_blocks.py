"""Looking at inputs: what is seen, in which order, and that nothing stays behind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from compress_llm.calibration.blocks import layer_runner, stages_of, watched


class Pair(nn.Module):
    def forward(self, hidden: Tensor, shift: float) -> tuple[Tensor, str]:
        return hidden + shift, "weights of an attention"


def three() -> dict[str, nn.Module]:
    return {name: nn.Linear(4, 4) for name in ("first", "second", "third")}


def test_neighbours_with_the_same_input_form_a_stage_in_the_order_they_run() -> None:
    linears, x = three(), torch.ones(2, 4)
    assert stages_of(linears, lambda: [linears[name](x) for name in ("third", "first")]) == [("third", "first")]
    equal = [x, x.clone()]  # the same numbers, and yet no shared input
    assert stages_of(linears, lambda: [linears["first"](equal[0]), linears["second"](equal[1])]) == [
        ("first",),
        ("second",),
    ]
    assert stages_of(linears, lambda: None) == []


def test_only_what_is_named_is_watched_and_hooks_go_also_when_a_run_fails() -> None:
    linears, x = three(), torch.ones(2, 4)
    seen: list[Tensor] = []

    def fail() -> None:
        with watched(linears, {"second": seen.append}):
            linears["first"](x)
            linears["second"](2 * x)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    linears["second"](x)
    assert len(seen) == 1 and torch.equal(seen[0], 2 * x)


def test_a_layer_runs_with_its_own_arguments_and_gives_its_states_alone() -> None:
    run = layer_runner(Pair(), 1)
    assert torch.equal(run(torch.ones(3), [{"shift": 5.0}, {"shift": 2.0}]), torch.full((3,), 3.0))
