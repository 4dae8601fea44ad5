"""Dense packing of small integer codes into 32-bit words, lowest bits first, without wider temporaries.

The word order is that of compressed-tensors: code i of a row lies in bits i*b … i*b+b-1 of the row's little-endian bit
string, stored unsigned with the offset 2^(b-1); bits after the last code are zero. For widths that divide eight no code
crosses a byte, so bytes are all this module touches: packing costs about one byte a code of memory, never eight.
Words are read as bytes in memory order, as safetensors stores them, which takes a little-endian machine.

Four-bit floating-point codes are kept in bytes and without an offset, two a byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 32


def words(count: int, bits: int) -> int:
    """Number of 32-bit words that hold `count` codes of `bits` bits."""
    return -(-count * bits // WORD_BITS)


def pack_bytes(codes: Tensor, bits: int) -> Tensor:
    """Pack `codes` (int8 [count]) into uint8 [⌈count · bits / 8⌉]: the bytes of one row that ends with its last code.

    Raises ValueError as `pack_rows` does.
    """
    packed = pack_rows(codes.unsqueeze(0), bits).view(torch.uint8).flatten()
    return packed[: -(-codes.shape[0] * bits // 8)].clone()


def unpack_bytes(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of `pack_bytes`: uint8 [⌈count · bits / 8⌉] to int8 [count]. Raises ValueError as `unpack_rows`."""
    padded = torch.nn.functional.pad(packed, (0, -packed.shape[0] % (WORD_BITS // 8)))
    return unpack_rows(padded.view(torch.int32).unsqueeze(0), bits, count)[0]


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """Pack each row of `codes` (int8 [rows, count], two's complement of `bits` bits) into int32 [rows, words].

    Raises ValueError for another dtype or rank, a width that does not divide eight, and codes outside the width: those
    would spill into their neighbours.
    """
    _check_width(bits)
    if codes.dtype != torch.int8 or codes.ndim != 2:
        raise ValueError(f"codes must be int8 and two-dimensional, not {codes.dtype} of rank {codes.ndim}")
    offset, mask, per_byte = 1 << (bits - 1), (1 << bits) - 1, 8 // bits
    if codes.numel():
        low, high = (int(end) for end in torch.aminmax(codes))
        if low < -offset or high >= offset:
            raise ValueError(f"codes reach from {low} to {high}, outside of {bits} bits")
    raw = codes.view(torch.uint8)
    packed = torch.zeros(codes.shape[0], words(codes.shape[1], bits), dtype=torch.int32, device=codes.device)
    octets = packed.view(torch.uint8)
    for place in range(per_byte):
        # Adding the offset modulo 2^bits is flipping the sign bit.
        piece = raw[:, place::per_byte] ^ offset
        piece &= mask
        piece <<= place * bits
        octets[:, : piece.shape[1]] |= piece
    return packed


def unpack_rows(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of `pack_rows`: int32 [rows, words] to int8 [rows, count].

    Raises ValueError for another dtype, a word count that does not fit `count`, and a width that does not divide eight.
    """
    _check_width(bits)
    if packed.dtype != torch.int32 or packed.ndim != 2 or packed.shape[1] != words(count, bits):
        raise ValueError(f"{count} codes of {bits} bits do not come from {packed.dtype} of shape {tuple(packed.shape)}")
    offset, mask, per_byte = 1 << (bits - 1), (1 << bits) - 1, 8 // bits
    octets = packed.contiguous().view(torch.uint8)
    codes = torch.empty(packed.shape[0], count, dtype=torch.int8, device=packed.device)
    for place in range(per_byte):
        target = codes[:, place::per_byte]
        piece = octets[:, : target.shape[1]] >> (place * bits)
        piece &= mask
        piece -= offset
        target.copy_(piece.view(torch.int8))
    return codes


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pairs of four-bit patterns (int8 [rows, count], 0 to 15) as bytes: uint8 [rows, count / 2], the first one low.

    Raises ValueError for another dtype or rank, an odd count, and patterns of more than four bits.
    """
    if codes.dtype != torch.int8 or codes.ndim != 2 or codes.shape[1] % 2:
        raise ValueError(f"{codes.dtype} of shape {tuple(codes.shape)} are no pairs of codes")
    raw = codes.view(torch.uint8)
    if raw.numel() and int(raw.max()) > 15:
        raise ValueError(f"codes reach {int(raw.max())}, outside of four bits")
    return raw[:, ::2] | (raw[:, 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The inverse of `pack_nibbles`: uint8 [rows, bytes] to int8 [rows, 2 · bytes]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).view(torch.int8)


def _check_width(bits: int) -> None:
    if bits not in (1, 2, 4, 8):
        raise ValueError(f"codes of {bits} bits are not packed here: only widths that divide eight")
