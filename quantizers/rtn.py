"""Rounding to nearest: every weight by itself, under scales that a rule of `scales.py` chose. The baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from ..calibration.statistics import Stats
from ..formats.rounded import Rounded, round_to_grid
from ..formats.scheme import Scheme
from .method import Options, Rounding
from .scales import choose


def round_nearest(
    weight: Tensor, scheme: Scheme, stats: Stats | None, scale_dtype: torch.dtype, options: Options
) -> Rounded:
    """Codes nearest to `weight` (float32 [out, in]). Option `scale_rule`: a rule of `scales.py`, by default minmax."""
    second_moment = None if stats is None else stats.second_moment
    return round_to_grid(weight, scheme, choose(weight, scheme, options["scale_rule"], scale_dtype, second_moment))


RTN = Rounding("rtn", round_nearest, options={"scale_rule": "minmax"})
