"""Low-bit floating-point codes in memory: bits lie where a shift and a mask leave a 16-bit number's own pattern.

A code of E2M1 or E4M3 has a sign, an exponent and a mantissa, as bfloat16 does: with the sign in bit 15 and the others
in the lowest exponent and highest mantissa bits, subnormal codes included, it *is* a bfloat16, too small by a power of
two. Words of 32 bits hold one such pattern in each half for every matrix step; later steps lie rotated by an amount at
which all find room. That of the last step of E2M1 finds none in one piece: its bits are chosen so that a product, which
is one instruction, takes them to their places. For float16 the kernels move the pattern up by the three exponent bits
that it has fewer.

Scales of blocks are bytes of five exponent and three mantissa bits, never subnormal: where a mask leaves them in both
halves of a word, three more exponent bits make the bfloat16 that takes the power of two away again. A word holds the
scales of two rows and two neighbouring blocks, one pair in its place and the other rotated by eight bits. Blocks whose
scale is zero, or 2^-30 of what others of their row have, become zero. Factors of rows, float32, hold what does not fit
a byte; kernels apply them to sums.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FIELDS: dict[int, tuple[tuple[tuple[int, int, int], ...], ...]] = {
    4: (((0x81C0, 0, 1),), ((0x81C0, 3, 1),), ((0x81C0, 6, 1),), ((0x001B, 6, 0x888),)),
    8: (((0x87F0, 0, 1),), ((0x80F0, 4, 1), (0x0700, 28, 1))),
}
"""By width of the code and by step: masks for both halves, the left rotation before each, and the factor after it."""
PATTERN = {4: 0x81C0, 8: 0x87F0}
"""By width of the code: the bits of a pattern."""

UNIT = {4: 29, 8: 23}
"""By width of the code: the field of exponents of a byte that stands for a scale of one."""
MOST = 30  # the largest field: one more would be an infinity in float16
NVFP4_FIELD = MOST - 8  # of a scale of one, so that 448 has the largest


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Codes (uint8 [..., half, step]) as bytes [..., 4]: one 32-bit word of 2 * 16 / bits of them."""
    word = torch.zeros(codes.shape[:-2], dtype=torch.int64, device=codes.device)
    for step, fields in enumerate(FIELDS[bits]):
        low, high = codes[..., step].long().unbind(-1)
        for field in fields:
            stored = torch.tensor(_stored(bits, field), device=codes.device)
            word |= _rotated(stored[low] | stored[high] << 16, 32 - field[1])
    return torch.stack([word >> shift & 255 for shift in (0, 8, 16, 24)], dim=-1).to(torch.uint8)


def unpack_words(packed: Tensor, bits: int) -> Tensor:
    """Bytes [..., 4] of `pack_words` back to codes (uint8 [..., half, step])."""
    parts = packed.to(torch.int64)
    word = parts[..., 0] | parts[..., 1] << 8 | parts[..., 2] << 16 | parts[..., 3] << 24
    steps = []
    for fields in FIELDS[bits]:
        pattern = torch.zeros_like(word)
        for mask, turn, times in fields:
            pattern |= (_rotated(word, turn) & mask * 0x10001) * times & PATTERN[bits] * 0x10001
        steps.append(torch.stack((pattern & 0xFFFF, pattern >> 16), dim=-1))
    return _codes(torch.stack(steps, dim=-1), bits).to(torch.uint8)


def values(codes: Tensor, bits: int) -> Tensor:
    """What E2M1 (4 bits, uint8 0 … 15) or E4M3 (8 bits) codes stand for, float32."""
    if bits == 8:
        return codes.view(torch.float8_e4m3fn).float()
    table = torch.tensor([*E2M1, *(-number for number in E2M1)], device=codes.device)
    return table[codes.long()]


def block_scales(scale: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scales of blocks as bytes, and what is left of them: (bytes, factors float32 [out], which blocks must be zero).

    `scale` [out, groups] is float8_e4m3fn, or uint8 exponents of two with a bias of 127 (E8M0).
    """
    if scale.dtype == torch.float8_e4m3fn:
        mantissas, exponents = torch.frexp(scale.float())  # mantissas in [.5, 1)
        fraction = (mantissas * 16).to(torch.int32) & 7
        fields = exponents - 1 + NVFP4_FIELD
        factors = torch.full((len(scale),), 2.0 ** (UNIT[bits] - NVFP4_FIELD), device=scale.device)
        nothing = scale.float() == 0
    else:
        exponents = scale.to(torch.int32) - 127
        most = exponents.amax(dim=1, keepdim=True)
        fields, fraction = exponents - most + MOST, 0
        factors = torch.exp2((most + (UNIT[bits] - MOST)).double()).float().view(-1)
        nothing = fields < 1
    byte = fields.clamp(1, MOST) << 3 | fraction
    return byte.to(torch.uint8), factors, nothing


def stored_scales(stored: Tensor, bits: int) -> Tensor:
    """Bytes of `block_scales` as float32: times factors, they are the scales."""
    byte = stored.to(torch.int32)
    return torch.exp2((byte >> 3) - UNIT[bits]) * (1 + (byte & 7) / 8)


def pack_scales(pairs: Tensor) -> Tensor:
    """Bytes [..., blocks, 2] of two rows and an even number of blocks, each two blocks made one word of four bytes."""
    first, second, third, fourth = pairs.unflatten(-2, (-1, 2)).flatten(-2).unbind(-1)
    bytes_ = torch.stack((first, fourth, second, third), dim=-1)
    return (bytes_ << 4 | bytes_.roll(1, dims=-1) >> 4).view_as(pairs)


def unpack_scales(words: Tensor) -> Tensor:
    """`pack_scales` back to the bytes."""
    packed = words.unflatten(-2, (-1, 2)).flatten(-2)
    first, fourth, second, third = (packed >> 4 | packed.roll(-1, dims=-1) << 4).unbind(-1)
    return torch.stack((first, second, third, fourth), dim=-1).view_as(words)


@cache
def _stored(bits: int, field: tuple[int, int, int]) -> tuple[int, ...]:
    """By code: the bits of `field` that become its pattern, or the field's part of it."""
    mask, _, times = field
    subset, becomes = mask, {}
    while subset:
        becomes[subset * times & PATTERN[bits]] = subset
        subset = subset - 1 & mask
    part = mask if times == 1 else PATTERN[bits]
    return tuple(becomes.get(_pattern(code, bits) & part, 0) for code in range(1 << bits))


def _pattern(code: int, bits: int) -> int:
    """The bfloat16 pattern of a code."""
    return code >> (bits - 1) << 15 | (code & ((1 << (bits - 1)) - 1)) << (6 if bits == 4 else 4)


def _codes(patterns: Tensor, bits: int) -> Tensor:
    return patterns >> 15 << (bits - 1) | (patterns >> (6 if bits == 4 else 4)) & ((1 << (bits - 1)) - 1)


def _rotated(words: Tensor, turn: int) -> Tensor:
    """32-bit words in int64, rotated left."""
    turn %= 32
    return (words << turn | words >> (32 - turn)) & 0xFFFFFFFF
