"""What the kernels of every folder are put together from and how they are loaded, once a device and specialisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch

from . import driver

DEVICE = Path(__file__).with_name("device.cuh").read_text(encoding="utf-8")
"""Source that comes in front of every kernel's."""


@cache
def loaded(
    cubin: Callable[[str, Mapping[str, int], str], bytes],
    name: str,
    macros: tuple[tuple[str, int], ...],
    shared_bytes: int,
    device: int,
) -> driver.Kernel:
    """The kernel `name` on `device`, the current one, from `cubin(name, macros, architecture)`."""
    major, minor = torch.cuda.get_device_capability(device)
    return driver.Kernel(cubin(name, dict(macros), f"sm_{major}{minor}a"), name, shared_bytes)


def wgmma(columns: int, kind: str) -> str:
    """The device function `wgmma` for 64 x `columns` sums, A in registers: the instruction names every register.

    `kind` "bf16", "f16", "s8" or "e4m3"; sums are int for "s8", else float. Without `add` the sums are new.
    """
    count = columns // 2
    inputs = 32 if kind in ("s8", "e4m3") else 16
    shape = f"k{inputs}.{'s32' if kind == 's8' else 'f32'}.{kind}.{kind}"
    signs = {"s8": "", "e4m3": ", 1, 1"}.get(kind, ", 1, 1, 0")  # of A and B; then whether B is transposed
    sums = ", ".join(f"%{i}" for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    held = ", ".join(f'"+{"r" if kind == "s8" else "f"}"(d[{i}])' for i in range(count))
    operation = f"wgmma.mma_async.sync.aligned.m64n{columns}{shape}"
    return (
        f"DEVICE void wgmma({'int' if kind == 's8' else 'float'}* d, const u32* a, u64 b, bool add) {{\n"
        f'  asm volatile("{{.reg .pred p;\\nsetp.ne.b32 p, %{count + 5}, 0;\\n'
        f'{operation} {{{sums}}}, {{{a}}}, %{count + 4}, p{signs};}}"\n'
        f'    : {held} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));\n}}\n'
    )
