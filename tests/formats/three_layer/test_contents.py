"""Three layers whose indices lead out of the weight; that each tensor is named is tested with the packing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress_llm.formats.errors import InputError
from compress_llm.formats.pruned import Pruned
from compress_llm.formats.scheme import SCHEMES
from compress_llm.formats.three_layer.contents import check
from compress_llm.formats.three_layer.packing import ThreeLayer
from compress_llm.formats.three_layer.tiles import Grid

from ..sparse_weights import ADVERSARIAL, adversarial

GRID = Grid(70, 132)  # its last tile has 6 rows of 2 slots


def packed(weight: Tensor) -> dict[str, Tensor]:
    return ThreeLayer().pack(Pruned(SCHEMES["SPARSE50"], weight))


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_what_was_packed_passes(name: str) -> None:
    check(packed(adversarial(name)), Grid(130, 260))


@pytest.mark.parametrize(
    ("steps", "inside"),
    [
        ([0xCC], True),
        ([0xDC], False),  # the destination
        ([0xCD], False),  # the source: these two lie in the rows that the weight does not have
        ([0x0C, 0xC0], True),  # dummies, which move one of the two each
        ([0x00], False),  # a dummy that moves both by 15
    ],
)
def test_steps_end_with_the_slots_of_an_edge_tile(steps: list[int], inside: bool) -> None:
    tensors = packed(torch.zeros(70, 132, dtype=torch.bfloat16))
    tensors["weight_steps"] = torch.tensor(steps, dtype=torch.uint8)
    tensors["weight_step_offsets"] = torch.tensor([0, 0, 0, 0, len(steps)])
    if inside:
        check(tensors, GRID)
    else:
        with pytest.raises(InputError, match="weight_steps: lead out of a tile; use a whole copy"):
            check(tensors, GRID)


@pytest.mark.parametrize(("columns", "said"), [([7, 5], "ascending"), ([5, 5], "ascending"), ([5], "not as many")])
def test_residual_columns_are_in_order_and_as_many_as_values(columns: list[int], said: str) -> None:
    tensors = packed(torch.zeros(70, 132, dtype=torch.bfloat16))
    tensors["weight_residual"] = torch.ones(2, dtype=torch.bfloat16)
    tensors["weight_residual_offsets"][4:] = 2
    tensors["weight_residual_columns"] = torch.tensor(columns, dtype=torch.int32)
    with pytest.raises(InputError, match=f"weight_residual_columns: .*{said}"):
        check(tensors, GRID)


def test_a_new_row_starts_anywhere() -> None:
    tensors = packed(torch.zeros(70, 132, dtype=torch.bfloat16))
    tensors["weight_residual"] = torch.ones(2, dtype=torch.bfloat16)
    tensors["weight_residual_offsets"][4:] = 1
    tensors["weight_residual_offsets"][9:] = 2
    tensors["weight_residual_columns"] = torch.tensor([131, 0], dtype=torch.int32)
    check(tensors, GRID)
