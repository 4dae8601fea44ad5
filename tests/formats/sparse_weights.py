"""Weights with zeros in them, for every packing of sparse weights: random, adversarial, and as pruning leaves them."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def random_weight(shape: tuple[int, int], density: float, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Numbers of every kind (a few -0.0, denormal, infinite ones) where a coin of `density` says so, else +0."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    kind = torch.randint(0, 60, shape, generator=generator)
    for number, value in enumerate((-0.0, 1e-40, float("inf"))):
        weight[kind == number] = value
    return weight.to(dtype).masked_fill(torch.rand(shape, generator=generator) >= density, 0.0)


def adversarial(name: str) -> Tensor:
    """Weights [130, 260] whose zeros lie where a packing may not expect them."""
    weight = random_weight((130, 260), 1.0, seed=1)
    rows, columns = torch.arange(130)[:, None], torch.arange(260)[None, :]
    keep = {
        "full": rows >= 0,
        "empty": rows < 0,
        "surplus in one tile": (rows < 64) & (columns < 128),
        "surplus in the last tile": (rows >= 128) & (columns >= 256),
        "one full row": rows == 77,
        "every other row": rows % 2 == 0,
        "full groups among empty ones": columns // 4 % 2 == 0,
        "one value": (rows == 129) & (columns == 259),
        "first of each group": columns % 4 == 0,
        "far apart": (columns % 128 < 4) | ((columns % 128 > 120) & (rows % 31 == 0)),
    }[name]
    return weight.masked_fill(~keep.expand(130, 260), 0.0)


ADVERSARIAL = (
    "full",
    "empty",
    "surplus in one tile",
    "surplus in the last tile",
    "one full row",
    "every other row",
    "full groups among empty ones",
    "one value",
    "first of each group",
    "far apart",
)


@st.composite
def any_weight(draw: st.DrawFn) -> Tensor:
    """Any shape around the edges of tiles, any density."""
    rows, columns = draw(st.integers(1, 140)), draw(st.integers(1, 270))
    density = draw(st.sampled_from([0.0, 0.02, 0.3, 0.5, 0.6, 0.9, 1.0]))
    return random_weight((rows, columns), density, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 1 << 20)))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal to the bit."""
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(torch.uint8), other.view(torch.uint8))
