"""How long a piece of work takes, side by side with what it is compared to.

On a GPU each candidate is captured in a CUDA graph that calls it many times, over weights that take turns so that the
cache does not help; replays of the candidates alternate, so that clocks and neighbours treat them alike, and the median
counts. On a CPU plain calls alternate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

Call = Callable[[], object]
ROUNDS = 9
LEAST_COPIES, MOST_COPIES = 6, 64
GRAPH_SECONDS, CPU_SECONDS = 2e-3, 5e-3  # of work between two looks at the clock
MOST_CALLS = 128


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: the median over rounds, and the extremes."""

    us: float
    low: float
    high: float


@dataclass(frozen=True)
class Limits:
    """What the device can do, measured: bytes a second to copy (read and written), operations a second in a product."""

    bytes_per_second: float
    operations_per_second: float

    def floor_us(self, nbytes: int, operations: int) -> float:
        """No call that moves `nbytes` and does `operations` can be faster, in microseconds."""
        return 1e6 * max(nbytes / self.bytes_per_second, operations / self.operations_per_second)


def copies(nbytes: int, device: torch.device) -> int:
    """How many weights of `nbytes` take turns: four times what the cache of the GPU holds, and no fewer than six."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MOST_COPIES, max(LEAST_COPIES, -(-4 * cache // max(1, nbytes))))


def interleaved(
    candidates: Mapping[str, Sequence[Call]], device: torch.device, rounds: int = ROUNDS, most_calls: int = MOST_CALLS
) -> dict[str, Timing]:
    """The timing of each candidate, a sequence of calls that take turns, at most so many between looks at the clock."""
    prepare = _graph if device.type == "cuda" else _loop
    runs = {name: prepare(calls, most_calls) for name, calls in candidates.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(run())
    return {
        name: Timing(1e6 * median(values), 1e6 * min(values), 1e6 * max(values)) for name, values in seconds.items()
    }


def limits(device: torch.device) -> Limits:
    """The bandwidth and the bfloat16 (float32 on a CPU) product of `device`, as plain PyTorch reaches them."""
    on_gpu = device.type == "cuda"
    source = torch.zeros(1 << (28 if on_gpu else 24), dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    size, dtype = (8192, torch.bfloat16) if on_gpu else (768, torch.float32)
    a, b = torch.randn(2, size, size, dtype=dtype, device=device)  # zeros and ones would cost less power
    # `copy_` would be the copy engine's, which is slower than what kernels reach.
    found = interleaved({"copy": [lambda: torch.neg(source, out=target)], "product": [lambda: a @ b]}, device, rounds=5)
    moved, done = 2 * source.nbytes, 2 * size**3
    return Limits(1e6 * moved / found["copy"].low, 1e6 * done / found["product"].low)


def _loop(calls: Sequence[Call], most: int) -> Callable[[], float]:
    """Seconds a call, over as many calls as take a few milliseconds."""
    once = _seconds(calls, 1)
    count = max(1, min(most, int(CPU_SECONDS / max(once, 1e-9))))
    return lambda: _seconds(calls, count)


def _seconds(calls: Sequence[Call], count: int) -> float:
    begun = time.perf_counter()
    for index in range(count):
        calls[index % len(calls)]()
    return (time.perf_counter() - begun) / count


def _graph(calls: Sequence[Call], most: int) -> Callable[[], float]:
    """As `_loop`, from a CUDA graph; every call is made before it is captured.

    A short graph tells how many calls the one that counts takes: launches from Python would be too slow to tell.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in (*calls, *calls):
            call()
        stream.synchronize()
    once = min(_replay(_captured(calls, len(calls), stream)) for _ in range(2)) / len(calls)
    count = max(len(calls), min(most, int(GRAPH_SECONDS / max(once, 1e-9))))
    graph = _captured(calls, count, stream)
    return lambda: _replay(graph) / count


def _captured(calls: Sequence[Call], count: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A graph of `count` calls, replayed once."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(count):
            calls[index % len(calls)]()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3
