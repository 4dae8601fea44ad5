"""GPTQ: columns are rounded one after the other, and what each loses is made up for by those still to come.

Frantar et al. 2022, arXiv 2210.17323: with H the second moment of the inputs, damped, and U the upper Cholesky factor
of its inverse, the error of column j divided by U_jj times row j of U is taken off the later columns. Updates within a
block of columns are applied when a column's turn comes, those beyond it once a block. Scales are chosen from the
original weight in its original groups, so that columns can be taken in the order of their inputs' energy while the
stored layout needs no index and no gather.

Everything is laid out [in, out] here: a column of the weight is then contiguous, and no step of the loop waits for a
number to come back from a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..calibration.statistics import Stats
from ..formats.errors import InputError
from ..formats.rounded import QParams, Rounded
from ..formats.scheme import Scheme
from .method import Options, Rounding
from .scales import choose


@dataclass(frozen=True)
class Factor:
    """What GPTQ needs of the inputs: the order of the columns, and in that order the rows of U divided by U_jj.

    `order` int64 [in]; `unit` float32 [in, in], upper triangular with ones on its diagonal; `energy` float32 [in], in
    that order, is 1 / U_jj²: what is left of an input's energy once the later inputs have made up for it.
    """

    order: Tensor
    unit: Tensor
    energy: Tensor


def round_gptq(
    weight: Tensor,
    scheme: Scheme,
    stats: Stats | None,
    scale_dtype: torch.dtype,
    options: Options,
    peak: Tensor | None = None,
) -> Rounded:
    """Codes of `weight` (float32 [out, in]) that lose little of the output on the calibration tokens.

    Options: `damp`, the share of H's mean diagonal that is added to it; `act_order`, columns by falling input energy;
    `block`, the number of columns between updates of the rest; `scale_rule`, how the static scales are chosen.
    """
    if stats is None or stats.second_moment is None:
        raise InputError("--method gptq", "needs calibration statistics", "give a --dataset")
    found = factor_of(stats, options["damp"], options["act_order"])
    params = choose(weight, scheme, options["scale_rule"], scale_dtype, stats.second_moment, peak)
    codes = solve(weight, scheme, params, found, options["block"])
    return Rounded(scheme, codes, params)


def factor_of(stats: Stats, damp: float, act_order: bool) -> Factor:
    """`factorize` of the second moment, computed once for all linears that read the same input."""
    key = ("gptq", damp, act_order)
    found = stats.memo.get(key)
    if not isinstance(found, Factor):
        if stats.second_moment is None:
            raise InputError("--method gptq", "needs calibration statistics", "give a --dataset")
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
    raise InputError("--method gptq", "the statistics of a layer's inputs are not positive definite", "raise damp")


def left_over(second_moment: Tensor, damp: float) -> Tensor:
    """The part of each input's energy [in] that inputs rounded later cannot make up for: what its error costs GPTQ."""
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


def solve(weight: Tensor, scheme: Scheme, params: QParams, factor: Factor, block: int) -> Tensor:
    """Codes (int8 [out, in]) of `weight` under fixed `params`, column by column in the order of `factor`."""
    order, unit = factor.order, factor.unit
    columns = weight.float().T[order].contiguous()
    group = order // (weight.shape[1] // params.groups)
    scale = params.step.T[group]
    zero = None if params.zero is None else params.zero.float().T[group]
    codes = torch.empty(columns.shape, dtype=torch.int8, device=columns.device)
    for start in range(0, columns.shape[0], block):
        stop = min(start + block, columns.shape[0])
        here = slice(start, stop)
        lost = _round_block(
            columns[here], scheme, scale[here], None if zero is None else zero[here], unit[here, here], codes[here]
        )
        columns[stop:].addmm_(unit[here, stop:].T, lost, alpha=-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=order.device)
    return codes[back].T.contiguous()


def _round_block(
    columns: Tensor, scheme: Scheme, scale: Tensor, zero: Tensor | None, unit: Tensor, codes: Tensor
) -> Tensor:
    """Round `columns` [block, out] in turn into `codes`; returns what each lost, [block, out]."""
    lost, rounded = torch.empty_like(columns), torch.empty_like(columns)
    for j in range(columns.shape[0]):
        column = torch.addmv(columns[j], lost[:j].T, unit[:j, j], alpha=-1) if j else columns[j]
        steps = column / scale[j]
        if zero is None:
            value = rounded[j] = scheme.grid.nearest(steps)
        else:
            rounded[j] = scheme.grid.nearest(steps.add_(zero[j]))
            value = rounded[j] - zero[j]
        torch.sub(column, value * scale[j], out=lost[j])
    codes.copy_(scheme.grid.encode(rounded))
    return lost


GPTQ = Rounding(
    "gptq",
    round_gptq,
    needs=frozenset({"second_moment"}),
    options={"damp": 0.3, "act_order": True, "block": 128, "scale_rule": "local-hessian"},
    hints={"compensated": True},
)
