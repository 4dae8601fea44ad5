"""SparseGPT: weights go column by column, and what each takes with it is made up for by those still to come.

Frantar & Alistarh 2023, arXiv 2301.00774, algorithm 1. What is dropped is decided a block of columns at a time, when
its turn comes and its weights have been updated, by w² / [H⁻¹]_jj of the inverse that is left at column j. Patterns of
a few neighbours are decided when the first of them is reached.

Everything is laid out [in, out] here, as in GPTQ, with which it shares the factor of the inverse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..calibration.factor import factor_of
from ..calibration.statistics import Stats
from ..formats.errors import InputError
from .masks import of_all, of_groups
from .method import Group, Options, Sparsifier


def prune_sparsegpt(weight: Tensor, ratio: float, group: Group | None, stats: Stats | None, options: Options) -> Tensor:
    """Drop weights and update the others so that little of the output is lost on the calibration tokens.

    Options: `damp`, the share of H's mean diagonal that is added to it; `act_order`, columns by falling input energy
    (with a pattern they keep their order); `block`, the number of columns that are decided on together. Raises
    InputError without second moments.
    """
    if stats is None or stats.second_moment is None:
        raise InputError("--method sparsegpt", "needs calibration statistics", "give a --dataset")
    found = factor_of(stats, options["damp"], options["act_order"] and group is None)
    order, unit = found.order, found.unit
    energy = found.energy.masked_fill(stats.second_moment.diagonal()[order] == 0, 0.0)  # never active: the first to go
    columns = weight.float().T[order].contiguous()
    block = max(1, options["block"])
    if group is not None:
        block = -(-block // group[1]) * group[1]
    for start in range(0, columns.shape[0], block):
        stop = min(start + block, columns.shape[0])
        here = slice(start, stop)
        lost = _prune_block(columns[here], unit[here, here], energy[here], ratio, group)
        columns[stop:].addmm_(unit[here, stop:].T, lost, alpha=-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=order.device)
    return columns[back].T.contiguous()


def _prune_block(columns: Tensor, unit: Tensor, energy: Tensor, ratio: float, group: Group | None) -> Tensor:
    """Prune `columns` [block, out] in place; returns what each lost, [block, out]."""
    lost = torch.zeros_like(columns)
    step = columns.shape[0] if group is None else group[1]
    drop = torch.empty(columns.shape, dtype=torch.bool, device=columns.device)
    for j in range(columns.shape[0]):
        if j % step == 0:
            here = slice(j, j + step)
            score = columns[here].square() * energy[here].unsqueeze(1)
            drop[here] = of_all(score, ratio, None) if group is None else of_groups(score.T, group).T
        lost[j] = columns[j] * drop[j]
        columns[j].masked_fill_(drop[j], 0.0)
        columns[j + 1 :].addr_(unit[j, j + 1 :], lost[j], alpha=-1)
    return lost


# The paper damps by 0.01. On few tokens that fits the text more than the model: bookllama-7m, 8k tokens of calibration,
# KL .470 at 0.01, .443 at 0.1, .417 at 0.3 (Wanda: .452); in the order of energy .516 at 0.01.
SPARSEGPT = Sparsifier(
    "sparsegpt",
    prune_sparsegpt,
    needs=frozenset({"second_moment"}),
    options={"damp": 0.3, "act_order": False, "block": 128},
    rounding="gptq",
    rounding_options={"act_order": False},  # the order in which the mask was chosen: KL .475, .491 by energy
)
