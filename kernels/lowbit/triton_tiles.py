"""How Triton kernels read a weight tile in fragment order (layout.py), shared by the product and the decoder.

Loads, joins and the permutation below are chosen so that on a GPU the tile already lies in the registers of a matrix
operand: the reshapes are renames. Pairs of codes become pairs of numbers in a few instructions that Triton has no words
for, so `PTX` selects inline assembly; without it plain operations say the same, which is what the interpreter runs.
"""

# What Triton compiles means other things than it says as Python.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl

# A register of two halves, each with codes from its low bits up, to one register a code: (code | base) - (base + 8).
_NIBBLES_BF16 = tl.constexpr("""{
.reg .b32 w1, w2, w3;
shr.u32 w1, $4, 4; shr.u32 w2, $4, 8; shr.u32 w3, $4, 12;
lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA; lop3.b32 $1, w1, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $2, w2, 0x000F000F, 0x43004300, 0xEA; lop3.b32 $3, w3, 0x000F000F, 0x43004300, 0xEA;
mov.b32 w1, 0x43084308;
sub.bf16x2 $0, $0, w1; sub.bf16x2 $1, $1, w1; sub.bf16x2 $2, $2, w1; sub.bf16x2 $3, $3, w1;
}""")
_NIBBLES_F16 = tl.constexpr(
    _NIBBLES_BF16.value.replace("0x43004300", "0x64006400")
    .replace("0x43084308", "0x64086408")
    .replace("bf16x2", "f16x2")
)
# Signed bytes: (low seven bits | base) - (bit 7 | base), where bit 7 of the base's number weighs 128.
_BYTES_BF16 = tl.constexpr("""{
.reg .b32 w1, s;
shr.u32 w1, $2, 8;
lop3.b32 $0, $2, 0x007F007F, 0x43004300, 0xEA; lop3.b32 s, $2, 0x00800080, 0x43004300, 0xEA; sub.bf16x2 $0, $0, s;
lop3.b32 $1, w1, 0x007F007F, 0x43004300, 0xEA; lop3.b32 s, w1, 0x00800080, 0x43004300, 0xEA; sub.bf16x2 $1, $1, s;
}""")
_BYTES_F16 = tl.constexpr(_BYTES_BF16.value.replace("0x43004300", "0x64006400").replace("bf16x2", "f16x2"))


@triton.jit
def nibbles(halves, HALF: tl.constexpr, PTX: tl.constexpr):
    """int16 [a, b] to [a, b, 2, 2]: the signed 4-bit codes as float16 (HALF) or bfloat16, code 2 x + y at [x, y]."""
    if PTX:
        if HALF:
            q0, q1, q2, q3 = tl.inline_asm_elementwise(
                _NIBBLES_F16, "=r,=r,=r,=r,r", [halves],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            q0, q1, q2, q3 = tl.inline_asm_elementwise(
                _NIBBLES_BF16, "=r,=r,=r,=r,r", [halves],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        q0 = number((halves & 15) - 8, HALF)
        q1 = number(((halves >> 4) & 15) - 8, HALF)
        q2 = number(((halves >> 8) & 15) - 8, HALF)
        q3 = number(((halves >> 12) & 15) - 8, HALF)
    return tl.join(tl.join(q0, q2), tl.join(q1, q3))


@triton.jit
def signed_bytes(halves, HALF: tl.constexpr, PTX: tl.constexpr):
    """int16 [a, b] to [a, b, 2]: the signed 8-bit codes as float16 (HALF) or bfloat16, low byte first."""
    if PTX:
        if HALF:
            q0, q1 = tl.inline_asm_elementwise(
                _BYTES_F16, "=r,=r,r", [halves], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
            )
        else:
            q0, q1 = tl.inline_asm_elementwise(
                _BYTES_BF16, "=r,=r,r", [halves], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )
    else:
        low = halves & 255
        q0 = number(low - ((low & 128) << 1), HALF)
        q1 = number(halves >> 8, HALF)
    return tl.join(q0, q1)


@triton.jit
def number(codes, HALF: tl.constexpr):
    """Integers as float16 (HALF) or bfloat16."""
    if HALF:
        return codes.to(tl.float32).to(tl.float16)
    else:  # noqa: RET505 - only one of the branches is compiled
        return codes.to(tl.float32).to(tl.bfloat16)


@triton.jit
def floating_codes(words, BITS: tl.constexpr):
    """int32 [a, b] to float32 [a, b, half, 2, 2] (BITS 4) or [a, b, half, 2]: the numbers of `floats.py`'s words."""
    w = words.to(tl.uint32, bitcast=True)
    if BITS == 4:
        q0 = floating_number(w & 0x81C081C0, BITS)
        turned = (w << 6) | (w >> 26)
        q1 = floating_number((w << 3) & 0x81C081C0, BITS)
        q2 = floating_number(turned & 0x81C081C0, BITS)
        q3 = floating_number(((turned & 0x001B001B) * 0x888) & 0x81C081C0, BITS)
        return tl.join(tl.join(q0, q2), tl.join(q1, q3))
    else:  # noqa: RET505 - only one of the branches is compiled
        q0 = floating_number(w & 0x87F087F0, BITS)
        q1 = floating_number(((w << 4) & 0x80F080F0) | ((w >> 4) & 0x07000700), BITS)
        return tl.join(q0, q1)


@triton.jit
def floating_number(pairs, BITS: tl.constexpr):
    """Two patterns in a word, uint32 [a, b], as float32 [a, b, 2]: E2M1 (BITS 4) or E4M3."""
    halves = tl.join(pairs & 0xFFFF, pairs >> 16)
    if BITS == 4:
        size = (halves >> 6) & 7
        value = tl.where(size < 2, size, ((2 | (size & 1)) << (size >> 1)) >> 1).to(tl.float32) * 0.5
    else:
        size = (halves >> 4) & 127
        value = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, value)  # in steps of 2^-9
    return tl.where((halves & 0x8000) != 0, -value, value)


@triton.jit
def byte_scales(byte, BITS: tl.constexpr):
    """Bytes of `floats.block_scales`, uint32, as float32, in the unit of the codes' own values."""
    field = (byte >> 3) + (127 - 29 if BITS == 4 else 127 - 23)
    return (field << 23 | (byte & 7) << 20).to(tl.float32, bitcast=True)


@triton.jit
def weight_block(
    codes_ptr, scales_ptr, zeros_ptr, part, blocks, block,
    BITS: tl.constexpr, GROUPED: tl.constexpr, NG: tl.constexpr, ZERO: tl.constexpr, FLOATING: tl.constexpr,
    HALF: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Rows part * 16 TILES on, inputs block * 128 on, of the weight: [16 TILES, 128] as float16 (HALF) or bfloat16.

    Without the factors of its rows. Codes come as int32 words where they are floating-point, else as int16 halves.

    `part` counts parts of 16 TILES rows; TILES is 4 or 8, a multiple of WARPS.
    """
    PARTS: tl.constexpr = 8 // TILES
    CHUNKS: tl.constexpr = BITS // 2
    R: tl.constexpr = TILES // WARPS
    at = (part // PARTS) * blocks + block
    first = (part % PARTS) * TILES
    i = tl.arange(0, R * CHUNKS * WARPS * 16)  # round, chunk, warp, sixteen half-lines of 32 bytes
    tile = first + (i // (CHUNKS * WARPS * 16)) * WARPS + (i // 16) % WARPS
    chunk = (i // (WARPS * 16)) % CHUNKS
    EACH: tl.constexpr = 8 if FLOATING else 16  # of a line
    line = ((tile * CHUNKS + chunk) * 16 + i % 16) * EACH
    given = tl.load(
        codes_ptr + at.to(tl.int64) * (8 * CHUNKS * 16 * EACH) + line[:, None] + tl.arange(0, EACH)[None, :]
    )
    if FLOATING:
        q = floating_codes(given, BITS)
    elif BITS == 4:
        q = nibbles(given, HALF, PTX)
    else:
        q = signed_bytes(given, HALF, PTX)
    if BITS == 4:
        q = tl.reshape(q, (R, CHUNKS, WARPS, 8, 2, 2, 2, 2, 2, 2, 2))
        q = tl.permute(q, (0, 2, 7, 3, 1, 9, 10, 6, 4, 5, 8))  # round, warp, ph, r | chunk, step, kh, c, e
    else:
        q = tl.reshape(q, (R, CHUNKS, WARPS, 8, 2, 2, 2, 2, 2, 2))
        q = tl.permute(q, (0, 2, 7, 3, 1, 9, 6, 4, 5, 8))
    q = tl.reshape(q, (TILES * 16, 128))
    n = tl.arange(0, TILES * 16)
    lane = ((at if GROUPED else part // PARTS) * 8 + first + n // 16) * 8 + n % 8  # its place among those with scales
    high = (n % 16) // 8
    if FLOATING:
        q = floating_scaled(q, scales_ptr, lane, high, BITS, GROUPED, NG).to(tl.float16 if HALF else tl.bfloat16)
    else:
        q = integer_scaled(q, scales_ptr, zeros_ptr, lane, high, NG, ZERO)
    return q


@triton.jit
def floating_scaled(q, scales_ptr, lane, high, BITS: tl.constexpr, GROUPED: tl.constexpr, NG: tl.constexpr):
    """Numbers [rows, 128] times their bytes of scales."""
    if GROUPED:
        group = tl.arange(0, NG)[None, :]
        word = scales_ptr + (lane[:, None] * NG + (group & ~1)) * 2
        at = tl.where(group % 2 == 0, 2 * high[:, None], 3 - 2 * high[:, None])  # its place before the word was turned
        byte = (tl.load(word + at).to(tl.uint32) >> 4) | ((tl.load(word + (at + 1) % 4).to(tl.uint32) << 4) & 255)
        q = q * spread(byte_scales(byte, BITS), NG)
    return q


@triton.jit
def integer_scaled(q, scales_ptr, zeros_ptr, lane, high, NG: tl.constexpr, ZERO: tl.constexpr):
    """Integers [rows, 128] less their zeros, times their scales, in their own dtype."""
    if NG == 1:
        offset = lane * 2 + high
        scale = tl.load(scales_ptr + offset)[:, None]
        if ZERO == 1:
            zero = ((tl.load(zeros_ptr + lane) >> (high * 4)) & 15).to(tl.float32)[:, None] - 8
        if ZERO == 2:
            zero = tl.load(zeros_ptr + offset)[:, None].to(tl.float32)
    else:
        byte = lane[:, None] * NG + tl.arange(0, NG)[None, :]
        offset = byte * 2 + high[:, None]
        scale = spread(tl.load(scales_ptr + offset), NG)
        if ZERO == 1:
            zero = spread(((tl.load(zeros_ptr + byte) >> (high * 4)[:, None]) & 15).to(tl.float32) - 8, NG)
        if ZERO == 2:
            zero = spread(tl.load(zeros_ptr + offset).to(tl.float32), NG)
    if ZERO != 0:
        q = (q.to(tl.float32) - zero).to(q.dtype)
    return (q.to(tl.float32) * scale.to(tl.float32)).to(q.dtype)


@triton.jit
def spread(values, NG: tl.constexpr, INPUTS: tl.constexpr = 128):
    """[rows, NG] to [rows, INPUTS]: each of a row's groups repeated over its inputs."""
    rows: tl.constexpr = values.shape[0]
    return tl.reshape(tl.broadcast_to(values[:, :, None], (rows, NG, INPUTS // NG)), (rows, INPUTS))
