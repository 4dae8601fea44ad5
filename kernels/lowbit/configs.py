"""Which configuration of a CUDA kernel runs a problem: a measured one where there is one, else a reasoned one.

Measured configurations lie in `tuned.json`, by device name and problem; `compress bench --tune` measures others into
the user's cache, which is read here too. Nothing is ever tried out inside a request.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ...formats.durable import write_atomically
from ..cuda import nvrtc
from .cuda_decode import MOST_TOKENS, DecodeConfig
from .cuda_gemm import GemmConfig
from .layout import Arranged

MOST_SHARED = 227 << 10  # bytes of shared memory that a block may have on compute capability 9.0
MOST_DYNAMIC = MOST_SHARED - 1024  # of them, beside what the kernels declare themselves
NARROW_TOKENS = 129
"""Tokens from which on 4-bit integers are multiplied as 8-bit numbers where activations have 8 bits: with fewer, a
product takes as long as reading the weights whatever they are multiplied as."""
SHIPPED = Path(__file__).with_name("tuned.json")
Config = DecodeConfig | GemmConfig
KINDS: dict[str, type[Config]] = {"decode": DecodeConfig, "gemm": GemmConfig}
"""Configurations by what files call the kernel."""
_MOST_STAGES = {16: 10, 32: 12, 48: 8, 64: 8, 128: 6, 256: 4}  # deeper rings bring nothing


@dataclass(frozen=True)
class Key:
    """What a tuned configuration is for. `tokens` is a bucket's upper end (see `bucket`)."""

    kind: str
    out_features: int
    in_features: int
    tokens: int

    def text(self) -> str:
        """How the key is written in the data file."""
        return f"{self.kind} {self.out_features}x{self.in_features} {self.tokens}"


def kind(weight: Arranged) -> str:
    """The variant of a kernel as far as speed is concerned.

    w4g128, w4g32z (integer zeros), w4f (float zeros), w8a8, w8a8b (scales of blocks); floating-point codes f4g16,
    f4g32, f8, f8a8, f8a8b; integers with 8-bit activations w4a8, w4af8.
    """
    letter = "f" if weight.floating else "w"
    if weight.narrow and weight.bits == 4:
        return "w4af8" if weight.floating else "w4a8"
    if weight.narrow:
        return f"{letter}8a8{'b' if weight.group else ''}"
    group = f"g{weight.group}" if weight.group else ""
    return f"{letter}{weight.bits}{group}" + (
        "" if weight.zeros is None else "z" if weight.zeros.dtype == torch.uint8 else "f"
    )


def bucket(tokens: int) -> int:
    """The next of 1, 2, 4, 8, 16, 32, 48, 64, then multiples of 64 up to 512 and powers of two."""
    if tokens <= 64:
        return next(size for size in (1, 2, 4, 8, 16, 32, 48, 64) if tokens <= size)
    return -(-tokens // 64) * 64 if tokens <= 512 else 1 << (tokens - 1).bit_length()


def configuration(weight: Arranged, tokens: int, device: torch.device) -> Config:
    """The configuration for a product of `weight` with `tokens` tokens on `device`."""
    about = torch.cuda.get_device_properties(device)
    key = Key(kind(weight), weight.out_features, weight.in_features, bucket(tokens))
    row = tuned(about.name).get(key.text())
    if row is not None:
        return read(row)
    return reasoned(weight, tokens, about.multi_processor_count)


def reasoned(weight: Arranged, tokens: int, processors: int) -> Config:
    """A configuration from the sizes alone: what was best of those measured on an H200 for shapes like it."""
    if tokens <= MOST_TOKENS and not weight.narrow:
        return _decode(weight, tokens, processors)
    return _gemm(weight, tokens, processors)


def _decode(weight: Arranged, tokens: int, processors: int) -> DecodeConfig:
    """Few tiles a processor: two share K. Many, and few tokens: more warps help."""
    tiles = -(-weight.out_features // 16)
    cluster = 2 if 2 * tiles <= 5 * processors else 1
    blocks = processors // cluster
    most = -(-tiles // blocks)  # tiles that a block gets
    pairs = 2 if most <= 4 else 4
    few = cluster > 1 and weight.blocks <= 32 and tokens <= 8  # blocks of inputs: a warp asks for more at once
    config = DecodeConfig(
        warps=12 if pairs == 4 and tokens <= 8 and weight.bits == 4 else 8,
        pairs=pairs,
        depth=3 if weight.bits == 8 or few else 2,
        cluster=cluster,
        unit=2 if most > 2 and 2 * -(-tiles // (2 * blocks)) <= most else 1,
        grid=processors,
    )
    while config.depth > 2 and config.shared_bytes(weight, tokens) > MOST_DYNAMIC:
        config = replace(config, depth=config.depth - 1)
    return config


def _gemm(weight: Arranged, tokens: int, processors: int) -> GemmConfig:
    """Tiles as wide as the tokens allow; where they are too few, K is cut: in a cluster and then outside."""
    wide = next((size for size in (16, 32, 48, 64, 128) if tokens <= size), 256)
    if wide == 256 and weight.row_tiles * -(-tokens // 256) < 48:
        wide = 128
    tiles = weight.row_tiles * -(-tokens // wide)
    pair = 2 if weight.narrow and wide == 256 else 1  # the cache cannot feed faster products with x for every tile
    config = GemmConfig(tokens=wide, pair=pair)
    if 2 * tiles <= processors:
        splits = _splits(2 * tiles, weight.blocks // 2, processors)
        config = replace(config, pair=1, depth=2, splits=splits)  # a cluster does one or the other
    elif 0 < tiles % processors <= processors // 2 and processors < tiles < 8 * processors:
        config = replace(config, tail=tiles % processors, splits=2)  # the last ones, which would leave half idle
    room = (MOST_DYNAMIC - config.shared_bytes(weight)) // config.stage_bytes(weight)
    return replace(config, stages=min(config.stages + room, _MOST_STAGES[wide]))


def _splits(blocks: int, steps: int, processors: int) -> int:
    """In how many parts of K, of some steps each, `blocks` thread blocks fill the processors."""
    return max(1, min(processors // blocks, steps // 8))


def read(row: dict[str, Any]) -> Config:
    """The configuration written as `row`: {"decode": {…}} or {"gemm": {…}}."""
    (name, values), *_ = row.items()
    return KINDS[name](**values)


def written(config: Config) -> dict[str, dict[str, int]]:
    """`read` backwards: the fields that differ from the defaults."""
    default = type(config)()
    values = {name: value for name, value in asdict(config).items() if value != getattr(default, name)}
    return {next(name for name, kind in KINDS.items() if isinstance(config, kind)): values}


@lru_cache(maxsize=8)
def tuned(device: str) -> dict[str, dict[str, Any]]:
    """Measured configurations for the device of that name: the user's over the shipped ones.

    What another version of the kernels was measured with, and these do not have, is passed over.
    """
    table: dict[str, dict[str, Any]] = {}
    for path in (SHIPPED, user_file()):
        if path.is_file():
            rows = json.loads(path.read_text(encoding="utf-8")).get(device, {})
            table.update({key: row for key, row in rows.items() if _current(row)})
    return table


def _current(row: dict[str, Any]) -> bool:
    return all(name in KINDS and row[name].keys() <= {item.name for item in fields(KINDS[name])} for name in row)


def user_file() -> Path:
    """Where `compress bench --tune` keeps what it measured."""
    return nvrtc.cache_directory() / "tuned.json"


def keep(device: str, rows: dict[str, dict[str, Any]]) -> None:
    """Add measured `rows` (key text to configuration) for `device` to the user's file."""
    path = user_file()
    table = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    table.setdefault(device, {}).update(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(table, indent=1, sort_keys=True).encode())
    tuned.cache_clear()
