"""The pass over the dense model before a run that gives sparse layers ratios of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...formats.errors import InputError
from ...formats.progress import Track
from ...sparsifiers.allocate import Measured
from .finite import check_finite
from .job import Job
from .plan import Unit

if TYPE_CHECKING:
    from ...calibration.blocks import Block
    from ...calibration.stream import Stream


def allocated(job: Job, stream: Stream | None, track: Track) -> Mapping[str, float]:
    """Share of dropped weights by sparse linear inside the blocks; the average over them is the recipe's.

    `stream` is at the first block, and through all of them afterwards. Raises InputError without one, for schemes with
    different ratios, and for NaN or Inf in a weight.
    """
    rule = job.methods.allocate
    ratios = {layer.scheme.sparsity.ratio for layer in job.plan.quantized if layer.scheme and layer.scheme.sparsity}
    if rule is None or stream is None or len(ratios) != 1:
        raise InputError(f"--allocate {rule}", "needs text and one ratio to start from", "give every rule the same")
    measured = Measured(ratios.pop(), rule)
    units = [unit for unit in job.plan.units if unit.block is not None]
    for unit in track(units, "measuring layers", len(units)):
        _measure(job, stream, unit, measured)
    return measured.ratios()


class _Loss:
    """How far a block's output moves with other weights, of a token's length, root mean square over the tokens.

    Tokens count alike: the norm of the next block scales each by its own length, and a few have lengths beyond all
    others. The block is left with the weights it was last given.
    """

    def __init__(self, stream: Stream, block: Block) -> None:
        self._stream, self._block = stream, block
        self._whole: list[Tensor] = []

    def __call__(self, weights: Mapping[str, Tensor]) -> float:
        if not self._whole:  # the first to be asked for comes with the block's own weights still in place
            self._whole = self._stream.look(self._block)
        self._stream.update(self._block, weights)
        moved, tokens = 0.0, 0
        for one, other in zip(self._whole, self._stream.look(self._block), strict=True):
            lengths = one.float().square().sum(-1)
            shares = (one.float() - other.float()).square().sum(-1) / lengths.clamp(min=torch.finfo(torch.float32).tiny)
            moved += float(shares.sum(dtype=torch.float64))
            tokens += shares.numel()
        return (moved / tokens) ** 0.5


def _measure(job: Job, stream: Stream, unit: Unit, measured: Measured) -> None:
    if unit.block is None:
        return
    checkpoint = job.plan.checkpoint
    names = sorted({*unit.kept, *(layer.source for layer in unit.layers)})
    stored = {name: check_finite(checkpoint.read(name, device=job.device), name) for name in names}
    sparse = {
        layer.name: stored[layer.source].float()
        for layer in unit.layers
        if layer.scheme is not None and layer.scheme.sparsity is not None
    }
    block = stream.block(unit.block, stored)
    stats = {name: seen for stage, seen in stream.collect(block, {"second_moment"}).items() for name in stage}
    measured.add(unit.block, sparse, stats, _Loss(stream, block))
    stream.update(block, sparse)
    stream.advance(block)
    stream.release(block)
