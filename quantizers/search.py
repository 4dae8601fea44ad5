"""What the searches for a scale share: judge many candidates on a few rows, then the best of them on all rows.

The loss of a candidate is smooth in its rows, so a sample of them finds the good ones; the last word is spoken on the
whole weight, where the candidate that changes nothing always takes part: a search never makes anything worse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..formats.rounded import fake_quantize
from ..formats.scheme import Scheme
from ..kernels.hadamard import rotated
from .scales import choose

Weighted = Sequence[tuple[Tensor, Scheme]]
Loss = Callable[[Weighted, Tensor], Tensor]  # (weights with their schemes, scale by source row) -> scalar


def best_scale(
    pairs: Weighted, trials: Sequence[Tensor], loss: Loss, rows: int, finalists: int
) -> tuple[int, float, float]:
    """The number of the best of `trials`, with the loss of the first of them (no change) and of the best.

    The coarse round looks at no more than `rows` rows of a weight; the first trial and the `finalists` best go on.
    """
    few = [(weight[:: -(-weight.shape[0] // rows)], scheme) for weight, scheme in pairs]
    coarse = torch.stack([loss(few, scale) for scale in trials[1:]]).nan_to_num(torch.inf)
    final = [0, *(1 + i for i in coarse.topk(min(finalists, len(trials) - 1), largest=False).indices.tolist())]
    whole = torch.stack([loss(pairs, trials[i]) for i in final]).nan_to_num(torch.inf)
    winner = int(whole.argmin())
    return final[winner], float(whole[0]), float(whole[winner])


def rounding_loss(weight: Tensor, scheme: Scheme, scale: Tensor, scale_dtype: torch.dtype, hessian: Tensor) -> Tensor:
    """tr(E H Eᵀ) for the error E of rounding `weight` · `scale` [in] to nearest and undoing the scale.

    `hessian` is the second moment [in, in], or the energy of each input [in] where errors are taken as independent.
    """
    scaled = rotated(weight * scale, scheme)
    error = fake_quantize(scaled, scheme, choose(scaled, scheme, "minmax", scale_dtype))
    error = rotated(error, scheme).div_(scale).sub_(weight)
    if hessian.dim() == 1:
        return (error.square_().sum(0) * hessian).sum()
    return (error @ hessian).mul_(error).sum()


def floored(values: Tensor) -> Tensor:
    """`values` [in], none below a thousandth of their mean: silent channels must not drive the scale of the rest."""
    return values.clamp(min=float(values.mean()) * 1e-3 + 1e-30)
