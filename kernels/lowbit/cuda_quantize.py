"""Launches quantize.cu: activations to 8-bit codes and a scale a token (compute capability 9.0).

As quick for one token, between two products, as for thousands: a token is several blocks' work where there are few.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cuda import driver
from . import cuda_source

MOST_BLOCKS = 8  # a cluster has no more everywhere
_LEAST_PIECES = 128  # of 16 bytes, for a block
_GIVEN = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}


@dataclass(frozen=True)
class QuantizeConfig:
    """How quantize.cu is specialised; its header says what the names mean. `exchange` is 0 or 1."""

    threads: int
    blocks: int = 1
    pieces: int = 1
    exchange: int = 1


def reasoned(tokens: int, pieces: int, processors: int) -> QuantizeConfig:
    """For tokens of so many `pieces` of 16 bytes: blocks as long as processors are idle, then threads, then pieces."""
    blocks = 1
    while blocks < MOST_BLOCKS and 2 * blocks * tokens <= processors and pieces >= 2 * blocks * _LEAST_PIECES:
        blocks *= 2
    own = -(-pieces // blocks)
    # One block a processor has threads for all there is; of several, each thread has more loads to wait for at a time.
    each = -(-own // 512) if tokens * blocks <= processors else min(8, max(1, own // _LEAST_PIECES))
    threads = min(1024, max(32, -(-own // (32 * each)) * 32))
    return QuantizeConfig(threads, blocks, -(-own // threads))


def macros(dtype: torch.dtype, given: torch.dtype | None, floating: bool, config: QuantizeConfig) -> dict[str, int]:
    """What quantize.cu is specialised by for activations of `dtype` and a scale for all of them of dtype `given`."""
    return {
        "HALF": int(dtype == torch.float16),
        "WIDE": int(dtype == torch.float32),
        "FLOATING": int(floating),
        "GIVEN": 0 if given is None else _GIVEN[given],
        "THREADS": config.threads,
        "BLOCKS": config.blocks,
        "PIECES": config.pieces,
        "EXCHANGE": config.exchange,
    }


def quantize(
    x: Tensor,
    input_scale: Tensor | None = None,
    floating: bool = False,
    pdl: bool = True,
    config: QuantizeConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes [M, in] and scales float32 [M] of `x` [M, in], float16, bfloat16 or float32.

    Codes are int8, or float8_e4m3fn where `floating`. `input_scale` [1] is the scale of every token, where it is given.
    Rows of `x` are contiguous and a multiple of 16 bytes long. `pdl` starts the kernel before its predecessor in the
    stream has finished.
    """
    tokens, features = x.shape
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn if floating else torch.int8)
    scale = torch.empty(tokens, dtype=torch.float32, device=x.device)
    if tokens == 0:
        return codes, scale
    if x.data_ptr() % 16:
        x = x.clone()  # it is read 16 bytes at a time
    if config is None:
        processors = torch.cuda.get_device_properties(x.device).multi_processor_count
        config = reasoned(tokens, features * x.element_size() // 16, processors)
    given = None if input_scale is None else input_scale.dtype
    arguments = [*(driver.pointer(tensor) for tensor in (x, input_scale, codes, scale)), ctypes.c_int(features)]
    cluster = config.blocks if config.exchange and given is None else 1
    shape = driver.Shape((tokens * config.blocks, 1), config.threads, 0, cluster)
    with torch.cuda.device(x.device):
        cuda_source.kernel("quantize", macros(x.dtype, given, floating, config), 0).launch(shape, arguments, pdl)
    return codes, scale
