"""Products of microscaled operands: emulated against float64 here, compiled for the GPUs that have them in hardware."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compress_llm.formats.float_grids import E2M1, E4M3, E8M0
from compress_llm.kernels.lowbit.triton_scaled import Microscaled, gemm

KINDS = {"nvfp4": (E2M1, E4M3, 16), "mxfp4": (E2M1, E8M0, 32), "mxfp8": (E4M3, E8M0, 32)}


def operand(kind: str, rows: int, columns: int) -> tuple[Microscaled, torch.Tensor]:
    """A random matrix, and what it stands for in float64."""
    grid, scales, span = KINDS[kind]
    generator = torch.Generator().manual_seed(rows)
    codes = grid.encode(torch.randn(rows, columns, generator=generator) * 2)
    steps = scales.encode(torch.rand(rows, columns // span, generator=generator) + 0.1)
    exact = grid.decode(codes).double() * scales.decode(steps).double().repeat_interleave(span, 1)
    packed = codes.view(torch.uint8)
    packed = packed[:, ::2] | packed[:, 1::2] << 4 if grid is E2M1 else packed.view(torch.float8_e4m3fn)
    return Microscaled(packed.contiguous(), steps.view(scales.dtype)), exact


@pytest.mark.parametrize("kind", KINDS)
def test_emulated(device, error, kind: str) -> None:
    x, x_exact = operand(kind, 5, 160)
    weight, exact = operand(kind, 72, 160)
    bias, factor = torch.randn(72), torch.tensor([0.25])
    moved = [Microscaled(part.codes.to(device), part.scales.to(device)) for part in (x, weight)]
    y = gemm(*moved, factor.to(device), bias.to(device), torch.float32, emulated=True)
    assert error(y, x_exact @ exact.T * 0.25 + bias.double()) < 1e-6


def test_operands_of_two_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="of one kind"):
        gemm(operand("nvfp4", 3, 64)[0], operand("mxfp4", 8, 64)[0], None, None, torch.float32)


def test_compiles_for_gpus_that_are_not_here(tmp_path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    script = Path(__file__).with_name("compile_triton.py")
    ran = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    rows = {tuple(line.split()[:2]): line for line in ran.stdout.splitlines()}
    for kind, capability in (("nvfp4", "100"), ("mxfp4", "120"), ("mxfp8", "100")):
        assert "block_scale" in rows[kind, capability]
    assert "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16" in rows["weights", "90"]
    assert all("f32.e4m3.e4m3" in rows[name, "90"] for name in ("narrow", "blocks"))
    assert all("cvt.e4m3" in rows[name, "90"] for name in ("quantize", "quantize_blocks"))
