"""Running sums over slices of the vocabulary against full logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from compress_llm.calibration.divergence import score
from compress_llm.calibration.heads import Head


def head(vocabulary: int, seed: int, gain: float = 1.0, cap: float | None = None, bias: bool = True) -> Head:
    torch.manual_seed(seed)
    linear = nn.Linear(6, vocabulary, bias=bias, dtype=torch.float64)
    linear.weight.data.mul_(gain)
    return Head(linear, vocabulary, torch.float64, cap=cap)


def case(vocabulary: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(9)
    hidden = torch.randn(2, tokens, 6, dtype=torch.float64)
    return hidden[0], hidden[1], torch.randint(vocabulary, (tokens,))


@pytest.mark.parametrize("tile", [(1, 1), (3, 4), (4, 7), (64, 37), (64, 64), None])
@pytest.mark.parametrize("gain", [1.0, 400.0])
@torch.no_grad()
def test_every_tile_gives_what_full_logits_give(tile: tuple[int, int] | None, gain: float) -> None:
    mine, other = head(37, 0, gain), head(37, 1, gain, cap=5.0, bias=False)
    hidden, other_hidden, targets = case(37, 10)
    q = mine.linear(hidden).log_softmax(1)
    p = (other.linear(other_hidden) / 5.0).tanh().mul(5.0).log_softmax(1)
    found = score(mine, hidden, targets, (other, other_hidden), tile)
    torch.testing.assert_close(found.nll, -q.gather(1, targets[:, None])[:, 0], rtol=0, atol=1e-9)
    torch.testing.assert_close(found.reference_nll, -p.gather(1, targets[:, None])[:, 0], rtol=0, atol=1e-9)
    torch.testing.assert_close(found.kl, (p.exp() * (p - q)).sum(1), rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(found.agree, (p.argmax(1) == q.argmax(1)).double())


@torch.no_grad()
def test_without_a_reference_there_is_only_surprise() -> None:
    mine = head(37, 0)
    hidden, _, targets = case(37, 10)
    found = score(mine, hidden, targets, tile=(4, 5))
    torch.testing.assert_close(found.nll, -mine.linear(hidden).log_softmax(1).gather(1, targets[:, None])[:, 0])
    assert found.kl is found.agree is found.reference_nll is None


@torch.no_grad()
def test_a_constant_added_to_all_logits_changes_nothing() -> None:
    mine, other = head(37, 0), head(37, 0)
    assert isinstance(mine.linear.bias, Tensor)
    other.linear.bias.data.add_(1000.0)
    hidden, _, targets = case(37, 10)
    found = score(mine, hidden, targets, (other, hidden), (4, 5))
    assert float(found.kl.abs().max()) < 1e-9
    torch.testing.assert_close(found.nll, found.reference_nll, rtol=0, atol=1e-9)


@torch.no_grad()
def test_no_tensor_as_wide_as_the_vocabulary_is_made() -> None:
    vocabulary, tokens = 5000, 20
    widest = 0

    class Watched(Head):
        def logits(self, inputs: Tensor, rows: tuple[Tensor, Tensor | None]) -> Tensor:
            nonlocal widest
            logits = super().logits(inputs, rows)
            widest = max(widest, logits.shape[1])
            return logits

    linear = nn.Linear(6, vocabulary, dtype=torch.float64)
    hidden, other_hidden, targets = case(vocabulary, tokens)
    watched = Watched(linear, vocabulary, torch.float64)
    score(watched, hidden, targets, (watched, other_hidden))
    assert widest == 1024


@torch.no_grad()
def test_a_tie_for_the_first_choice_agrees() -> None:
    linear, other = nn.Linear(1, 4, bias=False), nn.Linear(1, 4, bias=False)
    linear.weight.data = torch.tensor([[1.0], [3.0], [3.0], [0.0]])
    other.weight.data = torch.tensor([[1.0], [0.0], [3.0], [0.0]])
    hidden, targets = torch.ones(1, 1), torch.tensor([0])
    heads = [Head(one, 4, torch.float32) for one in (linear, other)]
    assert float(score(heads[0], hidden, targets, (heads[1], hidden), (1, 2)).agree) == 1.0
