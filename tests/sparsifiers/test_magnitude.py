"""Magnitude pruning: what goes is smaller than what stays, and what stays is untouched."""

import torch

from compress_llm.sparsifiers.magnitude import MAGNITUDE


def test_the_smallest_of_the_whole_weight_go():
    weight = torch.randn(8, 32)
    pruned = MAGNITUDE.function(weight, 0.6, None, None, {})
    kept = pruned != 0
    assert int(kept.sum()) == 256 - round(0.6 * 256)
    assert torch.equal(pruned[kept], weight[kept])
    assert float(weight[~kept].abs().max()) <= float(weight[kept].abs().min())
    assert not torch.signbit(pruned[~kept]).any()


def test_patterns_are_kept():
    pruned = MAGNITUDE.function(torch.randn(8, 32), 0.5, (2, 4), None, {})
    assert ((pruned != 0).view(8, 8, 4).sum(-1) == 2).all()
