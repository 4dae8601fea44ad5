"""Block Hadamard rotation: outliers of weights and inputs are spread over their block before anything is rounded.

MR-GPTQ, arXiv 2509.23202, section 4: y = (x R)(W R)ᵀ for the orthonormal block Hadamard matrix R. W R is what the
rounding sees, with statistics of x R, and what is stored; x R is computed while the model runs, before the inputs are
quantised. Nothing moves from one linear to another, so any linear can be rotated, whatever produces its inputs.
"""

from __future__ import annotations

from ..formats.errors import InputError
from ..formats.scheme import Scheme
from .method import Options, Rotation

LARGEST = 128  # of the blocks that fused kernels rotate while they quantise
ENOUGH = 32
"""Inputs that one scale must span for its block to be the rotation's. KL of bookllama-7m on development text, rotation
and GPTQ against rounding to nearest: MXFP4 in blocks of 32 -45 %, of 64 -43 %; NVFP4, whose scales span 16, in blocks
of 16 -21 %, of 64 and 128 -24 %."""


def block_size(scheme: Scheme, in_features: int, options: Options) -> int:
    """How many neighbouring inputs of a linear are mixed: option `block`, or, where it is 0, the block of a scale.

    Where that is short, or no power of two, it is the largest one up to `LARGEST` that divides. Raises InputError for a
    block that is no power of two or does not divide `in_features`, naming those that would.
    """
    fits = [size for size in _powers(LARGEST) if in_features % size == 0]
    asked = options["block"]
    if asked == 0:
        span = scheme.span(in_features)
        here = [size for size in fits if size == span >= ENOUGH] or fits
        if not here:
            raise InputError("--method hadamard", f"no power of two divides {in_features} inputs", "ignore this linear")
        return here[-1]
    if asked not in _powers(asked) or in_features % asked:
        would = ", ".join(map(str, fits)) or "another method"
        raise InputError(f"options: hadamard: block {asked}", f"does not fit {in_features} inputs", f"use {would}")
    return asked


def _powers(most: int) -> list[int]:
    """Powers of two from 2 up to `most`."""
    return [1 << shift for shift in range(1, most.bit_length())]


HADAMARD = Rotation("hadamard", block_size, options={"block": 0}, rounding_options={"scale_rule": "mse"})
