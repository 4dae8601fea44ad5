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

import torch
from torch import Tensor

from ..calibration.factor import Factor, factor_of
from ..calibration.statistics import Stats
from ..formats.errors import InputError
from ..formats.rounded import QParams, Rounded
from ..formats.scheme import Scheme
from .method import Options, Rounding
from .scales import choose


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


def round_pruned(
    weight: Tensor,
    pruned: Tensor,
    scheme: Scheme,
    stats: Stats | None,
    scale_dtype: torch.dtype,
    options: Options,
    peak: Tensor | None = None,
) -> Rounded:
    """The same for a weight of which only what is not zero in `pruned` (float32 [out, in]) is kept.

    What is dropped is lost like what rounding takes, and made up for in the same sweep (arXiv 2301.00774, section 3.5).
    Scales are chosen for the weights as pruning left them.
    """
    if stats is None or stats.second_moment is None:
        raise InputError("--method gptq", "needs calibration statistics", "give a --dataset")
    found = factor_of(stats, options["damp"], options["act_order"])
    params = choose(pruned, scheme, options["scale_rule"], scale_dtype, stats.second_moment, peak)
    return Rounded(scheme, solve(weight, scheme, params, found, options["block"], pruned != 0), params)


def solve(
    weight: Tensor, scheme: Scheme, params: QParams, factor: Factor, block: int, keep: Tensor | None = None
) -> Tensor:
    """Codes (int8 [out, in]) of `weight` under fixed `params`, column by column in the order of `factor`.

    Where `keep` (bool [out, in]) is false the code is 0, which must stand for the number 0.
    """
    order, unit = factor.order, factor.unit
    columns = weight.float().T[order].contiguous()
    group = order // (weight.shape[1] // params.groups)
    scale = params.step.T[group]
    zero = None if params.zero is None else params.zero.float().T[group]
    codes = torch.empty(columns.shape, dtype=torch.int8, device=columns.device)
    dropped = None if keep is None else ~keep.T[order]
    for start in range(0, columns.shape[0], block):
        stop = min(start + block, columns.shape[0])
        here = slice(start, stop)
        zero_here, dropped_here = (None if some is None else some[here] for some in (zero, dropped))
        lost = _round_block(columns[here], scheme, scale[here], zero_here, unit[here, here], codes[here], dropped_here)
        columns[stop:].addmm_(unit[here, stop:].T, lost, alpha=-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=order.device)
    return codes[back].T.contiguous()


def _round_block(
    columns: Tensor,
    scheme: Scheme,
    scale: Tensor,
    zero: Tensor | None,
    unit: Tensor,
    codes: Tensor,
    dropped: Tensor | None,
) -> Tensor:
    """Round `columns` [block, out] in turn into `codes`, where `dropped` to 0; returns what each lost, [block, out]."""
    lost, rounded = torch.empty_like(columns), torch.empty_like(columns)
    for j in range(columns.shape[0]):
        column = torch.addmv(columns[j], lost[:j].T, unit[:j, j], alpha=-1) if j else columns[j]
        value = scheme.grid.nearest(column / scale[j] if zero is None else (column / scale[j]).add_(zero[j]))
        if dropped is not None:
            value.masked_fill_(dropped[j], 0.0)
        rounded[j] = value
        torch.sub(column, (value if zero is None else value - zero[j]) * scale[j], out=lost[j])
    codes.copy_(scheme.grid.encode(rounded))
    return lost


GPTQ = Rounding(
    "gptq",
    round_gptq,
    needs=frozenset({"second_moment"}),
    options={"damp": 0.3, "act_order": True, "block": 128, "scale_rule": "local-hessian"},
    hints={"compensated": True},
    masked=round_pruned,
)
