"""Rounding to nearest: every weight by itself, under scales that a rule of `scales.py` chose. The baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from ..calibration.statistics import Stats
from ..formats.rounded import Rounded, round_to_grid
from ..formats.scheme import Scheme
from .method import Options, Rounding
from .scales import DEFAULT, choose, resolve


def round_nearest(
    weight: Tensor,
    scheme: Scheme,
    stats: Stats | None,
    scale_dtype: torch.dtype,
    options: Options,
    peak: Tensor | None = None,
) -> Rounded:
    """Codes nearest to `weight` (float32 [out, in]). Option `scale_rule`: a rule of `scales.py`, by default
    the scheme's own.

    Symmetric minmax is the baseline that other tools publish, so it gives their codes, bit for bit: weights are divided
    by the scale in the dtype of the checkpoint, as compressed-tensors does, which turns a few per cent of the weights
    next to the middle of two codes the other way. (It divides by scales that are codes in float32.)
    """
    rule = resolve(options["scale_rule"], scheme)
    params = choose(weight, scheme, rule, scale_dtype, None if stats is None else stats.second_moment, peak)
    if rule != "minmax" or not scheme.symmetric or scheme.scale_grid is not None:
        return round_to_grid(weight, scheme, params)
    scale = params.scale.unsqueeze(-1)
    grouped = weight.to(scale_dtype).reshape(weight.shape[0], scale.shape[1], -1)
    return Rounded(scheme, scheme.grid.encode((grouped / scale).float()).reshape(weight.shape), params)


def round_pruned(
    weight: Tensor,
    pruned: Tensor,
    scheme: Scheme,
    stats: Stats | None,
    scale_dtype: torch.dtype,
    options: Options,
    peak: Tensor | None = None,
) -> Rounded:
    """Codes nearest to what pruning left: zeros stay zeros under a symmetric scheme."""
    del weight
    return round_nearest(pruned, scheme, stats, scale_dtype, options, peak)


RTN = Rounding("rtn", round_nearest, options={"scale_rule": DEFAULT}, masked=round_pruned)
