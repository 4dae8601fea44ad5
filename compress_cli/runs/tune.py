"""Searches configurations of the CUDA kernels for this GPU and keeps the best where later runs find them.

A configuration is timed only after its result was compared with float64: wrong ones are often the fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...formats.errors import InputError
from ...formats.progress import Track
from ...kernels.cuda.nvrtc import CompileError
from ...kernels.lowbit import configs, cuda_decode, cuda_gemm, cuda_source
from ...kernels.lowbit.configs import Config
from ...kernels.lowbit.cuda_decode import DecodeConfig
from ...kernels.lowbit.cuda_gemm import GemmConfig
from ...kernels.lowbit.layout import Arranged
from ...kernels.lowbit.product import picked, run
from ...kernels.sparse_linear import fits
from .bench_kernels import Kind, Weights
from .kernel_check import MOST, errors
from .timing import Call, interleaved

GAIN = 0.98  # of the time of what ran before, for a configuration to replace it


@dataclass(frozen=True)
class Tuned:
    """What was found for one problem: microseconds before and after; how many were tried, were wrong, failed."""

    key: str
    before_us: float
    after_us: float
    tried: int
    wrong: int
    failed: int
    config: dict[str, dict[str, int]]


def tune(kinds: Sequence[Kind], tokens: Sequence[int], device: torch.device, track: Track) -> Iterator[Tuned]:
    """Search for every kind and number of tokens, and keep what is found; sparse kernels have nothing to search.

    Raises InputError where the CUDA kernels cannot run.
    """
    searched = [kind for kind in kinds if not fits(kind[0])]
    for scheme, shape in track(searched, "searching configurations", len(searched)):
        weights = Weights(scheme, shape, device, torch.bfloat16)
        for count in tokens:
            picked(weights.arranged[0], count, weights.dtype, asked="cuda")  # raises where it cannot run
            yield _search(weights, count)


def _search(weights: Weights, tokens: int) -> Tuned:
    weight, device = weights.multiplied(weights.arranged[0], tokens), weights.device
    now = configs.configuration(weight, tokens, device)
    x = torch.randn(tokens, weights.shape[1], generator=torch.Generator().manual_seed(tokens)).to(device, weights.dtype)
    x, token_scale = weights.inputs(x)
    right: dict[Config, list[Call]] = {}
    wrong = failed = 0
    candidates = dict.fromkeys((now, *neighbours(weight, tokens, now)))
    with ThreadPoolExecutor() as pool:  # the compiler takes most of a search
        list(pool.map(lambda config: _compile(weights, tokens, config), candidates))
    for config in candidates:
        try:
            good = _is_right(weights, x, token_scale, config)
        except RuntimeError:  # it does not compile, or takes more than the device has of something
            failed += 1
            continue
        if good:
            right[config] = _calls(weights, x, token_scale, config)
        else:
            wrong += 1
    if now not in right:
        raise InputError("--tune", f"the configuration in use gives wrong results for {tokens} tokens", "report it")
    times = interleaved({repr(config): calls for config, calls in right.items()}, device)
    before = times[repr(now)].us
    best = min(right, key=lambda config: times[repr(config)].us)
    if times[repr(best)].us > GAIN * before:
        best = now
    key = configs.Key(configs.kind(weight), *weights.shape, configs.bucket(tokens)).text()
    row = configs.written(best)
    if best != now:
        configs.keep(torch.cuda.get_device_properties(device).name, {key: row})
    return Tuned(key, before, times[repr(best)].us, len(right) + wrong + failed, wrong, failed, row)


def _compile(weights: Weights, tokens: int, config: Config) -> None:
    """Machine code for `config` into the cache; what does not compile fails again, and is counted, when it is run."""
    weight, dtype = weights.multiplied(weights.arranged[0], tokens), weights.dtype
    arch = "sm_{}{}a".format(*torch.cuda.get_device_capability(weights.device))
    with suppress(CompileError):
        if isinstance(config, DecodeConfig):
            cuda_source.cubin("decode", cuda_decode.macros(weight, dtype, tokens, config), arch)
        else:
            cuda_source.cubin("gemm", cuda_gemm.macros(weight, dtype, config), arch)


def _is_right(weights: Weights, x: Tensor, token_scale: Tensor | None, config: Config) -> bool:
    """Whether the kernel is as exact as a dense product, twice with the same bits."""
    y = _empty(weights, x)
    run(x, weights.multiplied(weights.arranged[0], len(x)), y, config, None, token_scale)
    again = _empty(weights, x)
    run(x, weights.multiplied(weights.arranged[-1], len(x)), again, config, None, token_scale)
    error, dense = errors(y, x, token_scale, weights.scheme, weights.stored)
    return bool(torch.equal(y, again)) and error <= MOST * dense


def _calls(weights: Weights, x: Tensor, token_scale: Tensor | None, config: Config) -> list[Call]:
    y = _empty(weights, x)
    copies = [weights.multiplied(weight, len(x)) for weight in weights.arranged]
    return [lambda weight=weight: run(x, weight, y, config, None, token_scale) for weight in copies]


def _empty(weights: Weights, x: Tensor) -> Tensor:
    return torch.full((x.shape[0], weights.shape[0]), torch.nan, dtype=weights.dtype, device=weights.device)


def neighbours(weight: Arranged, tokens: int, now: Config) -> Iterator[Config]:
    """Configurations worth trying for `tokens` tokens, all within the shared memory of a block."""
    candidates = _decode_neighbours(now) if isinstance(now, DecodeConfig) else _gemm_neighbours(now)
    for config in candidates:
        needed = (
            config.shared_bytes(weight, tokens) if isinstance(config, DecodeConfig) else config.shared_bytes(weight)
        )
        if needed <= configs.MOST_DYNAMIC:
            yield config


def _decode_neighbours(now: DecodeConfig) -> Iterator[DecodeConfig]:
    for cluster in (1, 2):
        for pairs, unit in ((4, 1), (2, 2), (2, 1)):
            for warps, depth in ((8, 2), (8, 3), (8, 4), (12, 2), (12, 3), (16, 2)):
                for stages in (2, 3):
                    yield DecodeConfig(warps, pairs, depth, stages, cluster, unit, now.grid)
    yield replace(now, spread=0)


def _gemm_neighbours(now: GemmConfig) -> Iterator[GemmConfig]:
    for fewer in (0, 1, 2):
        if now.stages - fewer >= 2:
            yield replace(now, stages=now.stages - fewer)
    for depth, splits in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2)):
        yield replace(now, depth=depth, splits=splits, tail=-1)
    yield replace(now, exact=0)
    for pair in (1, 2):
        for swizzle in (8, 16):
            yield replace(now, pair=pair, depth=1 if pair > 1 else now.depth, swizzle=swizzle)
