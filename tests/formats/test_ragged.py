"""Offsets of rows in flat tensors."""

import pytest
import torch

from compress_llm.formats.errors import InputError
from compress_llm.formats.ragged import checked_offsets, offsets_of


def test_offsets_begin_at_zero_and_end_at_the_sum():
    assert offsets_of(torch.tensor([2, 0, 3])).tolist() == [0, 2, 2, 5]
    tensors = {"ends": torch.tensor([0, 2, 2, 5]), "flat": torch.zeros(5), "half": torch.zeros(3)}
    assert checked_offsets(tensors, "ends", "flat").tolist() == [2, 0, 3]
    assert checked_offsets(tensors, "ends", "half", 2).tolist() == [2, 0, 3]


@pytest.mark.parametrize("ends", [[1, 2, 2, 5], [0, 3, 2, 5], [0, 2, 2, 4], [0, 2, 2, 6], [0, 1, -(2**63), 5]])
def test_offsets_that_lead_elsewhere_are_refused(ends):
    with pytest.raises(InputError, match="ends: do not lead from 0 to the 5 elements of flat"):
        checked_offsets({"ends": torch.tensor(ends), "flat": torch.zeros(5)}, "ends", "flat")
