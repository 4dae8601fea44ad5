"""Which device a run computes on, from the word that the user gave."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ...formats.errors import InputError

if TYPE_CHECKING:
    import torch


def pick_device(word: str = "auto") -> torch.device:
    """`auto` (the first GPU, else the CPU), `cpu`, `cuda` or `cuda:N` as a torch device.

    Raises InputError for another word, and for a GPU that torch does not see.
    """
    import torch

    match = re.fullmatch(r"auto|cpu|cuda(?::(\d+))?", word)
    if match is None:
        raise InputError(f"--device {word}", "is not a device", "use auto, cpu, cuda or cuda:N")
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if word == "cpu" or (word == "auto" and seen == 0):
        return torch.device("cpu")
    index = int(match[1] or 0)
    if index >= seen:
        cause = f"torch {torch.__version__} sees {seen or 'no'} CUDA GPU{'s' if seen > 1 else ''}"
        raise InputError(f"--device {word}", cause, "run compress doctor to see why, or use --device cpu")
    return torch.device("cuda", index)
