"""Counters in device memory for results that several thread blocks make together: who arrives last finishes them."""

from __future__ import annotations

import torch
from torch import Tensor

_MOST_STREAMS, _COUNTERS = 64, 4096
_ARRIVALS: dict[torch.device, Tensor] = {}
_STREAMS: dict[torch.device, dict[int, int]] = {}


def arrivals(device: torch.device, count: int) -> Tensor:
    """Counters for tiles that are made in parts: zero, and left at zero by every kernel that uses them.

    Kernels of one stream follow each other and share theirs; those of two streams would meet in the same counters.
    """
    stream = torch.cuda.current_stream(device).cuda_stream
    streams = _STREAMS.setdefault(device, {})
    row = streams.setdefault(stream, len(streams))
    if (
        count > _COUNTERS
        or row >= _MOST_STREAMS
        or (device not in _ARRIVALS and torch.cuda.is_current_stream_capturing())
    ):
        return torch.zeros(count, dtype=torch.int32, device=device)
    return prepare(device)[row]


def prepare(device: torch.device) -> Tensor:
    """The counters of all streams of `device`, made at the first call; before a CUDA graph could own them."""
    if device not in _ARRIVALS:
        _ARRIVALS[device] = torch.zeros(_MOST_STREAMS, _COUNTERS, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)  # they are zero for every stream
    return _ARRIVALS[device]
