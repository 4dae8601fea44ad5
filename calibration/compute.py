"""Which dtype blocks compute in on this machine: the one of float32 and bfloat16 that multiplies matrices faster."""

from __future__ import annotations

import time

import torch

ADVANTAGE = 1.5
"""How much faster bfloat16 must be to be taken. Machines differ by a factor of five or more one way or the other, so
the answer does not change between two runs on one of them."""


def probed_dtype() -> torch.dtype:
    """float32, or bfloat16 where a CPU has instructions for it; decided by timing one product of each (about 10 ms)."""
    return torch.bfloat16 if _seconds(torch.float32) > ADVANTAGE * _seconds(torch.bfloat16) else torch.float32


def _seconds(dtype: torch.dtype, size: int = 384, repeats: int = 3) -> float:
    a = torch.ones(size, size, dtype=dtype)
    best = float("inf")
    for _ in range(repeats + 1):  # the first one also loads the kernel
        start = time.perf_counter()
        torch.mm(a, a)
        best = min(best, time.perf_counter() - start)
    return best
