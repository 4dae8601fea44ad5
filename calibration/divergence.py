"""Token scores from two heads at once: surprise, Kullback-Leibler divergence, equal first choice.

Logits of a real vocabulary are the largest tensor of an evaluation, so they are never held: the vocabulary is walked in
slices, and of each token only running sums are kept (the online softmax of Milakov and Gimelshein, 2018, extended to
the divergence). Products are float32 or better, running sums float64.

With p the reference's distribution over logits a, q the model's over logits b, and Z their normalisers,
    KL(p‖q) = E_p[a - b] - log Z_a + log Z_b.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .heads import Head

# Slices that stay in a CPU core's cache; a GPU wants fewer, larger products.
TILE = {"cpu": (512, 1024)}
GPU_TILE = (2048, 16384)


@dataclass(frozen=True)
class Scores:
    """Per scored token, float64 [tokens]: `nll` in nats, and with a reference its own, `kl` (reference‖model), `agree`.

    `agree` is 1 where the reference's first choice is one of the model's, else 0.
    """

    nll: Tensor
    reference_nll: Tensor | None = None
    kl: Tensor | None = None
    agree: Tensor | None = None


class _Softmax:
    """Running normaliser of one head's distribution for some tokens, and the logit of each token's target."""

    def __init__(self, targets: Tensor) -> None:
        self.targets = targets
        self.top = torch.full(targets.shape, -torch.inf, dtype=torch.float64, device=targets.device)
        self.sum = torch.zeros_like(self.top)
        self.target = torch.full_like(self.top, torch.nan)

    def take(self, logits: Tensor, start: int, top: Tensor | None = None) -> Tensor:
        """Add a slice whose first column is token `start`. Returns what earlier sums are to be multiplied with.

        `logits` becomes exp(logits - running maximum).
        """
        inside = (self.targets >= start) & (self.targets < start + logits.shape[1])
        column = (self.targets - start).clamp_(0, logits.shape[1] - 1).unsqueeze(1)
        self.target = torch.where(inside, logits.gather(1, column).squeeze(1).double(), self.target)
        new = torch.maximum(self.top, (logits.amax(1) if top is None else top).double())
        fade = (self.top - new).exp_()
        logits.sub_(new.to(logits.dtype).unsqueeze(1)).exp_()
        self.sum.mul_(fade).add_(logits.sum(1).double())
        self.top = new
        return fade

    @property
    def log_z(self) -> Tensor:
        return self.sum.log() + self.top

    @property
    def nll(self) -> Tensor:
        return self.log_z - self.target


class _Block:
    """Running scores of some tokens under the model's head and, with `paired`, the reference's."""

    def __init__(self, targets: Tensor, paired: bool) -> None:
        self.model = _Softmax(targets)
        self.reference = _Softmax(targets) if paired else None
        self.gap = torch.zeros_like(self.model.top)
        self.choice = torch.full_like(self.gap, -torch.inf)

    def take(self, logits: Tensor, other: Tensor | None, start: int) -> None:
        """Add a slice of the model's logits and the reference's; both tensors are used up."""
        if self.reference is not None and other is not None:
            top, column = other.max(1, keepdim=True)
            rises = top.squeeze(1).double() > self.reference.top
            self.choice = torch.where(rises, logits.gather(1, column).squeeze(1).double(), self.choice)
            gap = other - logits
            fade = self.reference.take(other, start, top.squeeze(1))
            self.gap.mul_(fade).add_(gap.mul_(other).sum(1).double())
        self.model.take(logits, start)

    def scores(self) -> Scores:
        if self.reference is None:
            return Scores(self.model.nll)
        kl = self.gap / self.reference.sum - self.reference.log_z + self.model.log_z
        return Scores(self.model.nll, self.reference.nll, kl, (self.choice == self.model.top).double())


def score(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    reference: tuple[Head, Tensor] | None = None,
    tile: tuple[int, int] | None = None,
) -> Scores:
    """Scores of `targets` (int64 [tokens]) given `hidden` [tokens, hidden] of the model and, if any, the reference.

    `tile` is how many tokens and how much of the vocabulary are in work at once.
    """
    height, width = tile or TILE.get(targets.device.type, GPU_TILE)
    spans = [slice(start, start + height) for start in range(0, len(targets), height)]
    blocks = [_Block(targets[span], reference is not None) for span in spans]
    sides = [(head, head.inputs(hidden))]
    if reference is not None:
        sides.append((reference[0], reference[0].inputs(reference[1])))
    for start in range(0, head.vocabulary, width):
        rows = [side.rows(start, min(start + width, head.vocabulary)) for side, _ in sides]
        for block, span in zip(blocks, spans, strict=True):
            logits = [side.logits(inputs[span], part) for (side, inputs), part in zip(sides, rows, strict=True)]
            block.take(logits[0], logits[1] if len(logits) > 1 else None, start)
    return _joined([block.scores() for block in blocks])


def _joined(parts: list[Scores]) -> Scores:
    nll = torch.cat([part.nll for part in parts])
    if parts[0].kl is None:
        return Scores(nll)
    fields = ("reference_nll", "kl", "agree")
    return Scores(nll, *(torch.cat([getattr(part, field) for part in parts]) for field in fields))
