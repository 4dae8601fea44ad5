"""Which kernel takes how many tokens, and why: measured, by device, in `routes.json`.

Up to `decode` tokens the weights stream through decode.cu, up to `batch` through batch.cu; beyond, expanding them once
and one dense product is faster. Streams of more than SHORT row tiles have more sums than batch.cu has registers for:
decode.cu takes up to `tall` tokens of them, a few at a time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_TABLE = Path(__file__).with_name("routes.json")
NAMES = ("decode", "batch", "dense")
SHORT = 4


@dataclass(frozen=True)
class Routes:
    """The most tokens of each kernel."""

    decode: int = 16
    batch: int = 128
    tall: int = 96

    def name(self, tokens: int, tiles: int = 1) -> str:
        """The route of a product with that many tokens; streams have that many row tiles."""
        if tiles > SHORT:
            return "decode" if tokens <= self.tall else "dense"
        return "decode" if tokens <= self.decode else "batch" if tokens <= self.batch else "dense"


@cache
def routes(device: str) -> Routes:
    """The routes on the device of that name: measured there, or else those of an H200."""
    return Routes(**json.loads(_TABLE.read_text(encoding="utf-8")).get(device, {}))
