"""Inputs as 8-bit codes: what they stand for, and in which order codes come for 4-bit weights.

8-bit weights take codes as they follow each other in a token. Eight 4-bit integers of a word become two words of four
bytes by one mask each (gemm_numbers.cuh), and then a lane of a matrix instruction holds other inputs than it would of
8-bit weights. A product does not depend on the order of inputs that both operands have, so the codes of the inputs are
put in the order of the weights, and one copy of the weights does for products with 16-bit activations as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import BLOCK

_PIECE = 4  # scales in 16 bytes
_INPUT = (2, 2, 2, 2, 4, 2)
"""How the number of an input within a block falls into digits: piece of codes, matrix step (two digits), half of its
columns, lane of four, column of two."""
_PLACE = (0, 3, 2, 4, 5, 1)
"""The digit of the input that each digit of its place is: matrix step (two), half of its columns, lane, byte (two)."""


def pitch(tokens: int) -> int:
    """The length of a row of scales of tokens, one for 128 inputs: whole pieces of 16 bytes, as kernels fetch them."""
    return (tokens + _PIECE - 1) // _PIECE * _PIECE


def shuffled(x: Tensor) -> Tensor:
    """Codes [M, in] of one byte, whole blocks of inputs, in the order in which 4-bit codes are unpacked."""
    digits = x.view(torch.uint8).view(-1, *_INPUT).permute(0, *(1 + digit for digit in _PLACE))
    return digits.reshape(x.shape).view(x.dtype)


def natural(x: Tensor) -> Tensor:
    """`shuffled` backwards."""
    sizes = [_INPUT[digit] for digit in _PLACE]
    back = sorted(range(len(_PLACE)), key=_PLACE.__getitem__)
    return (
        x.view(torch.uint8).view(-1, *sizes).permute(0, *(1 + digit for digit in back)).reshape(x.shape).view(x.dtype)
    )


def values(x: Tensor, token_scale: Tensor | None, bits: int) -> Tensor:
    """What a product with weights of `bits` bits is given, float64 [M, in].

    `x` [M, in] are the numbers themselves, or codes in units of `token_scale`: [M], or [blocks, M or more] for every
    128 inputs. Codes for 4-bit weights are shuffled.
    """
    if token_scale is None:
        return x.double()
    if token_scale.ndim == 1:
        return (natural(x) if bits == 4 else x).double() * token_scale.double().unsqueeze(1)
    steps = token_scale[:, : x.shape[0]].T.double().unsqueeze(-1)
    return (x.double().unflatten(1, (-1, BLOCK)) * steps).flatten(1)
