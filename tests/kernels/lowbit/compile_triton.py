"""Compiles Triton kernels for GPUs that need not be there; a process of its own, since tests without one interpret.

Prints a line for each: its name and the matrix instructions in its PTX.
"""

from __future__ import annotations

import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from compress_llm.kernels.lowbit import (
    triton_gemm,
    triton_narrow,
    triton_quantize,
    triton_quantize_blocks,
    triton_round,
    triton_scaled,
)

POINTERS = {"bias_ptr": "*bf16", "y_ptr": "*bf16", "factor_ptr": "*fp32", "factors_ptr": "*fp32", "scale_ptr": "*fp32"}
POINTERS |= {"token_scale_ptr": "*fp32", "row_scale_ptr": "*fp32", "partial_ptr": "*fp32", "x_ptr": "*bf16"}
POINTERS |= {"weight_ptr": "*bf16", "given_ptr": "*fp32", "eps": "fp32", "tiny": "fp32"}
SCALED = {"nvfp4": ("e2m1", "*u8", "*fp8e4nv", 16), "mxfp4": ("e2m1", "*u8", "*u8", 32)}
SCALED |= {"mxfp8": ("e4m3", "*fp8e4nv", "*u8", 32)}


def compiled(label: str, kernel, capability: int, constants: dict, pointers: dict[str, str]) -> None:
    given = POINTERS | pointers
    signature = {name: "constexpr" if name in constants else given.get(name, "i32") for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    built = triton.compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", capability, 32))
    found = re.findall(r"(?:tcgen05\.mma|wgmma\.mma_async|mma\.sync)[\w.:]*", built.asm["ptx"])
    found.append("cvt.e4m3" if "satfinite.e4m3x2" in built.asm["ptx"] else "")
    sys.stdout.write(f"{label} {capability} {' '.join(sorted(set(found)))}\n")


def main() -> None:
    for kind, capability in (("nvfp4", 100), ("mxfp4", 120), ("mxfp8", 100)):
        form, code, scale, span = SCALED[kind]
        constants = {"FORMAT": form, "PACKED": 2 if form == "e2m1" else 1, "SPAN": span, "FACTOR": True, "BIAS": False}
        constants |= {"TOKENS": 128, "ROWS": 64, "STEP": 128, "EMULATED": False}
        pointers = {"x_ptr": code, "x_scale_ptr": scale, "w_ptr": code, "w_scale_ptr": scale}
        compiled(kind, triton_scaled._gemm, capability, constants, pointers)
    meaning = {"BITS": 4, "GROUPED": True, "NG": 8, "ZERO": 0, "FLOATING": True, "HALF": False, "PTX": True}
    shape = {"BIAS": True, "TOKENS": 16, "TILES": 4, "STAGES": 3, "WIDEN": False}
    pointers = {"codes_ptr": "*i32", "scales_ptr": "*u8", "zeros_ptr": "*i32"}
    compiled("weights", triton_gemm._gemm, 90, meaning | shape | {"WARPS": 4, "SPLITS": 1}, pointers)
    pointers = {"x_ptr": "*fp8e4nv", "codes_ptr": "*fp8e4nv"}
    for blocks in (False, True):
        constants = shape | {"FLOATING": True, "BLOCKS": blocks}
        compiled("blocks" if blocks else "narrow", triton_narrow._gemm, 90, constants, pointers)
    constants = {"NORM": False, "GIVEN": False, "WIDTH": 512, "PDL": True, "HALF": False, "BRAIN": True}
    constants |= {"FLOATING": True, "TWIN": False}
    compiled("quantize", triton_quantize._quantize, 90, constants, {"codes_ptr": "*fp8e4nv"})
    constants = {"SPAN": 128, "WIDTH": 512, "SHUFFLE": True, "PDL": True, "HALF": False, "BRAIN": True}
    constants |= {"FLOATING": True, "TWIN": False}
    pointers = {"codes_ptr": "*fp8e4nv", "reach": "fp32"}
    compiled("quantize_blocks", triton_quantize_blocks._quantize, 90, constants, pointers)
    floats = dict.fromkeys(("lowest", "highest", "reach", "reach_power", "tiny"), "fp32")
    constants = {"SPAN": 16, "WIDTH": 512, "SCALES": 2, "MANTISSA": 1, "LEAST": 0, "HALF": False, "BRAIN": True}
    constants |= {"LOW": -2, "HIGH": 5, "FOUR": False}
    compiled("round", triton_round._round, 90, constants | {"PDL": True}, floats)


if __name__ == "__main__":
    main()
