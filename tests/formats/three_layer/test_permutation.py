"""The order of columns: a permutation always, and chosen for the smaller file."""

import pytest
import torch

from compress_llm.formats.three_layer.permutation import balanced, best_order


@pytest.mark.parametrize("width", [1, 3, 4, 10, 64])
def test_dealing_keeps_every_column(width):
    dealt = balanced(torch.randint(0, 9, (width,)))
    assert sorted(dealt.tolist()) == list(range(width))


def test_dense_and_sparse_columns_share_a_group():
    counts = torch.arange(16)
    sums = counts[balanced(counts)].view(4, 4).sum(1)
    assert int(sums.max() - sums.min()) == 0


def test_the_better_order_is_taken():
    dense_first = (torch.arange(64) < 32).expand(64, 64)
    assert best_order(dense_first, 2).tolist() != list(range(64))
    two_of_four = (torch.arange(64) % 4 < 2).expand(64, 64)
    assert best_order(two_of_four, 2).tolist() == list(range(64))
