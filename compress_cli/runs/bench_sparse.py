"""Sparse weights to measure: random numbers under masks as pruning makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.registry import Pick
from ...kernels.sparse.product import arrange, picked, product
from .stored import rows_at_a_time
from .timing import copies

Mask = Literal["iid", "wanda"]


class SparseWeights:
    """Copies of one random weight, half of it (or what `kept` says) zero. A `Measured` of bench_kernels.py.

    `asked` names the implementation whose layout they are in and that multiplies them; None leaves it to the registry,
    which raises InputError for one that cannot run.
    """

    group_size: int | None = None

    def __init__(
        self,
        shape: tuple[int, int],
        device: torch.device,
        dtype: torch.dtype,
        mask: Mask = "iid",
        kept: float = 0.5,
        name: str | None = None,
        asked: str | None = None,
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.name = name or f"{kept:.0%} {mask}"
        self.asked = asked
        self.weight = random_weight(shape, device, dtype, mask, kept)
        first = arrange(self.weight, asked)
        self.nbytes = first.nbytes
        self.arranged = [first, *(first.clone() for _ in range(copies(first.nbytes, device) - 1))]
        self.dense = [self.weight, *(self.weight.clone() for _ in range(copies(self.weight.nbytes, device) - 1))]
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def products(self, x: Tensor, pdl: bool = True, route: str | None = None) -> list[Callable[[], Tensor]]:
        """The product of `x` with every copy, by the CUDA kernel that `route` names where it does."""
        return [lambda weight=weight: product(x, weight, None, self.asked, route, pdl) for weight in self.arranged]

    def picked(self, tokens: int) -> Pick:
        """The implementation that runs these products."""
        return picked(self.arranged[0], tokens, self.dtype, self.asked)

    def errors(self, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Relative errors against float64, of `y` and of the dense product."""
        ours = dense = total = 0.0
        step = rows_at_a_time(self.shape[1])
        for start in range(0, self.shape[0], step):
            rows = self.weight[start : start + step]
            exact = x.double() @ rows.double().T
            ours += float((y[:, start : start + step].double() - exact).square().sum())
            dense += float((functional.linear(x, rows).double() - exact).square().sum())
            total += float(exact.square().sum())
        scale = max(total, torch.finfo(torch.float64).tiny)
        return (ours / scale) ** 0.5, (dense / scale) ** 0.5


def random_weight(
    shape: tuple[int, int], device: torch.device, dtype: torch.dtype, mask: Mask = "iid", kept: float = 0.5
) -> Tensor:
    """Normal numbers, the share `kept` of which is left.

    Mask "iid" drops each by chance; "wanda" keeps the largest of each row after columns are scaled by lognormal(1)
    numbers, as the norms of a layer's inputs scale them, which makes whole columns dense or sparse.
    """
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(shape, device=device, generator=generator)
    if mask == "iid":
        left = torch.rand(shape, device=device, generator=generator) < kept
    else:
        score = weight.abs() * torch.randn(shape[1], device=device, generator=generator).exp()
        least = score.kthvalue(shape[1] - round(kept * shape[1]), dim=1, keepdim=True).values
        left = score > least
    return (weight * 0.02).to(dtype).masked_fill_(~left, 0)  # no -0, which is a number that is stored
