"""What the second moment of a linear's inputs says of how its columns can make up for each other.

With H the second moment, damped, and U the upper Cholesky factor of its inverse: where weight j is changed by e, the
later weights of its row lose least of the output when e times row j of U over U_jj is taken off them. Methods that go
through a weight column by column (GPTQ, SparseGPT) share this factor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats.errors import InputError
from .statistics import Stats


@dataclass(frozen=True)
class Factor:
    """The order of the columns, and in that order the rows of U divided by U_jj.

    `order` int64 [in]; `unit` float32 [in, in], upper triangular with ones on its diagonal; `energy` float32 [in], in
    that order, is 1 / U_jj²: what is left of an input's energy once the later inputs have made up for it.
    """

    order: Tensor
    unit: Tensor
    energy: Tensor


def factor_of(stats: Stats, damp: float, act_order: bool) -> Factor:
    """`factorize` of the second moment, computed once for all linears that read the same input."""
    key = ("factor", damp, act_order)
    found = stats.memo.get(key)
    if not isinstance(found, Factor):
        if stats.second_moment is None:
            raise InputError("this method", "needs calibration statistics", "give a --dataset")
        found = stats.memo[key] = factorize(stats.second_moment, damp, act_order)
    return found


def factorize(second_moment: Tensor, damp: float, act_order: bool) -> Factor:
    """Order and factor for `second_moment` (float32 [in, in]).

    Inputs that were never active count as independent of the rest: their weights are rounded to nearest. The factor is
    taken in float32, in float64 where that fails. Raises InputError where both do (statistics that are not finite).
    """
    hessian = second_moment.clone()
    diagonal = hessian.diagonal()
    mean = diagonal.mean()
    silent = diagonal == 0
    diagonal += damp * mean
    diagonal[silent] = torch.where(mean > 0, mean, torch.ones_like(mean))
    order = torch.arange(hessian.shape[0], device=hessian.device)
    if act_order:
        order = diagonal.sort(descending=True, stable=True).indices
        hessian = hessian[order][:, order]
    for dtype in (torch.float32, torch.float64):
        upper, failed = _inverse_root(hessian.to(dtype))
        if not failed:
            steps = upper.diagonal()
            return Factor(order, (upper / steps.unsqueeze(1)).float(), steps.square().reciprocal().float())
    raise InputError("calibration", "the statistics of a layer's inputs are not positive definite", "raise damp")


def left_over(second_moment: Tensor, damp: float) -> Tensor:
    """The part of each input's energy [in] that inputs rounded later cannot make up for: what its error costs."""
    found = factorize(second_moment, damp, act_order=True)
    energy = torch.empty_like(found.energy)
    energy[found.order] = found.energy
    return energy


def _inverse_root(hessian: Tensor) -> tuple[Tensor, bool]:
    """U, upper triangular, with Uᵀ U = H⁻¹, and whether the factorisation failed.

    With H = V Vᵀ for an upper triangular V (a Cholesky factor read backwards), U is V⁻¹: H itself is never inverted.
    """
    lower, info = torch.linalg.cholesky_ex(hessian.flip(0, 1))
    backwards = lower.flip(0, 1)
    identity = torch.eye(hessian.shape[0], dtype=hessian.dtype, device=hessian.device)
    upper = torch.linalg.solve_triangular(backwards, identity, upper=True)
    return upper, bool(info.any() | ~upper.isfinite().all())
