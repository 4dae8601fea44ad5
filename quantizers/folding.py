"""Moving a scale from a linear's inputs into whatever produces them, so that the block computes the same function.

The targets' columns are multiplied by the scale and the producer's outputs divided by it: a norm's weight, or the rows
of the linear before. What is stored is rounded, so the scale that is really applied is taken from the rounded norm; the
fold then costs nothing, whatever the dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .method import LiveFeed, Source


def fold_norm(weight: Tensor, offset: float, scale: Tensor, stored: torch.dtype) -> Tensor:
    """Divide what a norm multiplies by, `weight` + `offset` [in], by `scale` in place; returns the scale that it did.

    The result holds values of dtype `stored`, and the returned scale (float64) is exact for them. A channel that could
    not be stored near enough (1 + weight next to zero) is left alone: its scale is 1.
    """
    before = weight.double() + offset
    after = (before / scale.double() - offset).to(stored)
    done = before / (after.double() + offset)
    near = ((done / scale.double()).log2().abs() < 0.25) & (before != 0)
    weight.copy_(torch.where(near, after.to(weight.dtype), weight))
    return torch.where(near, done, torch.ones_like(done))


def fold_linear(rows: Tensor, bias: Tensor | None, scale: Tensor) -> None:
    """Divide the outputs of a linear by `scale` [out] in place: its `rows` [out, in] and its `bias` [out]."""
    rows.div_(scale.to(rows.dtype).unsqueeze(1))
    if bias is not None:
        bias.div_(scale.to(bias.dtype))


def power_of_two(scale: Tensor) -> Tensor:
    """The nearest powers of two: multiplying by them rounds nothing in any float format."""
    return scale.log2().round().exp2()


def gathered(values: Tensor, source: Source | None) -> Tensor:
    """Per source row the mean of `values` [in] over the input channels that read it."""
    if source is None or source.shared is None:
        return values
    rows, shared = source.weight.shape[0], source.shared.cpu()  # a GPU would add in any order
    total = torch.zeros(rows, dtype=values.dtype).index_add_(0, shared, values.cpu())
    return (total / torch.bincount(shared, minlength=rows).clamp_(min=1)).to(values.device)


def spread(scale: Tensor, source: Source | None) -> Tensor:
    """A scale by source row [source] as a scale by input channel [in]."""
    return scale if source is None or source.shared is None else scale[source.shared]


def apply(feed: LiveFeed, scale: Tensor, stored: torch.dtype) -> Tensor:
    """Fold `scale` (by source row) into the feed, in place: source, targets and statistics.

    Returns the scale that the targets' columns were multiplied by, float32 [in].
    """
    source = feed.source
    if source is None:
        raise ValueError("a feed without a source has nothing to fold a scale into")
    done = scale.double()
    if source.kind == "norm":
        done = fold_norm(source.weight, source.offset, scale, stored)
        if source.bias is not None:
            source.bias.div_(done.to(source.bias.dtype))
    else:
        fold_linear(source.weight, source.bias, scale)
    columns = spread(done, source)
    for target in feed.targets:
        target.weight.mul_(columns.to(target.weight.dtype))
    for stats in (feed.stats, feed.held, *feed.parts):
        if stats is not None:
            stats.rescale(columns.float())
    return columns.float()
