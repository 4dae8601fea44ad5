"""What stream.cuh does, instruction by instruction, on the words that layout.py makes: the dense weight comes out.

Ring, look-ahead and table of selectors are those of the kernel, so that an order of reading that only the packer's own
inverse understands would not pass.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compress_llm.kernels.sparse.layout import RING

CHUNK, WINDOW = 2048, 2
LANES = np.arange(32)


def entry(mask: int) -> tuple[int, int]:
    select, count = [], 0
    for e in range(4):
        place = 3
        if mask >> e & 1:
            place, count = count, count + 1
        select.append((2 * place + 1) << 4 | 2 * place)
    low = (0xFFFF0000 if mask == 15 else 0) | select[1] << 8 | select[0]
    return low, count << 16 | select[3] << 8 | select[2]


ENTRIES = np.array([entry(mask) for mask in range(16)], dtype=np.uint64)


def funnel(low: np.ndarray, high: np.ndarray, shift: np.ndarray) -> np.ndarray:
    return ((high << np.uint64(32) | low) >> (shift & np.uint64(31))) & np.uint64(0xFFFFFFFF)


def byte_perm(x: np.ndarray, y: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both, result = y << np.uint64(32) | x, np.zeros_like(x)
    for i in range(4):
        which = selector >> np.uint64(4 * i) & np.uint64(7)
        result |= (both >> (which * np.uint64(8)) & np.uint64(255)) << np.uint64(8 * i)
    return result


class Warp:
    """A warp on its way through stream `number` of `packed`."""

    def __init__(self, packed, number: int) -> None:
        self.packed, self.number = packed, number
        self.values = packed.values.contiguous().view(torch.int16).numpy().tobytes()
        starts = packed.starts.tolist()
        self.chunks = packed.head + (starts[number + 1] - starts[number] + 15) // 16
        self.tail = (packed.streams * packed.head * 16 + starts[number]) * 128
        self.ring = np.zeros(RING * CHUNK + 256, dtype=np.uint8)
        self.have = self.fetched = 0
        for _ in range(min(RING, self.chunks)):
            self.fetch()
        self.position, self.column = np.zeros(32, dtype=np.uint64), LANES * 4

    def fetch(self) -> None:
        head = self.packed.head
        at = self.number * head * CHUNK if self.fetched < head else self.tail - head * CHUNK
        chunk = np.frombuffer(self.values, np.uint8, CHUNK, at + self.fetched * CHUNK)
        slot = self.fetched % RING
        self.ring[slot * CHUNK : (slot + 1) * CHUNK] = chunk
        if slot == 0 and self.fetched > 0:
            self.ring[RING * CHUNK :] = chunk[:256]
        self.fetched += 1

    def word(self, offset: int) -> np.ndarray:
        at = (self.position.astype(np.int64) & (RING * CHUNK - 128) | self.column) + offset
        return np.ascontiguousarray(self.ring[at[:, None] + np.arange(4)]).view("<u4")[:, 0].astype(np.uint64)

    def step(self, masks: np.ndarray, byte: int) -> np.ndarray:
        """uint16 [32 lanes, 8 groups, 4]."""
        move = byte & 31
        self.position = self.position[(LANES + move) % 32]
        self.column = move * 4 + self.column & 127
        if byte >> 5:
            if self.have >= WINDOW and self.fetched < self.chunks:
                self.fetch()
            self.have += 1
        rotated = funnel(masks, masks, np.uint64(4))
        shift, out = self.position >> np.uint64(2), np.zeros((32, 8, 4), dtype=np.uint16)
        for g in range(8):
            part = (rotated if g & 1 else masks) >> np.uint64(8 * (g >> 1)) & np.uint64(0x78)
            low, high = ENTRIES[part >> np.uint64(3)].T
            w0, w1, w2 = self.word(0), self.word(128), self.word(256)
            first, second = funnel(w0, w1, shift), funnel(w1, w2, shift) & (low | np.uint64(0xFFFF))
            for i, selector in enumerate((low, high)):
                pair = byte_perm(first, second, selector)
                out[:, g, 2 * i], out[:, g, 2 * i + 1] = pair & np.uint64(0xFFFF), pair >> np.uint64(16)
            taken = high >> np.uint64(16)
            self.position = self.position + taken * np.uint64(64)
            shift = shift + taken * np.uint64(16)
            assert int(self.position.max()) <= self.have * 32 * 64
        return out


def emulated(packed) -> torch.Tensor:
    cut = packed.cut
    bands = packed.streams // cut.warps
    dense = np.zeros((bands * cut.rows, cut.inputs), dtype=np.uint16)
    masks = packed.masks.numpy().view(np.uint32).astype(np.uint64)
    table = packed.table.view(torch.uint8).tolist()
    for number in range(packed.streams):
        warp = Warp(packed, number)
        for step, ((tile, group), slot) in enumerate(zip(cut.order(), cut.slots(), strict=True)):
            at = (number * cut.steps + step) * 32
            got = warp.step(masks[at : at + 32], table[number * cut.blocks * cut.words * 4 + slot])
            row = number // cut.warps * cut.rows + tile * 16 + LANES // 4
            column = (number % cut.warps * cut.groups + group) * 64 + LANES % 4 * 8
            for g in range(8):
                first = column + g // 4 * 32 + g // 2 % 2 * 4
                for e in range(4):
                    dense[row + g % 2 * 8, first + e] = got[:, g, e]
        assert warp.have == warp.chunks
    return torch.from_numpy(dense.view(np.int16))[: packed.out_features, : packed.in_features]


@pytest.mark.parametrize(
    ("kind", "kept", "cut"),
    [
        ("even", 0.3, (2, 4, 3, 2, 2)),
        ("even", 0.5, (1, 6, 7, 7, 1)),
        ("even", 0.7, (3, 2, 4, 4, 2)),
        ("skewed", 0.5, (2, 3, 5, 2, 1)),
        ("rows", 0.5, (1, 6, 4, 3, 2)),
        ("side", 0.5, (2, 3, 4, 4, 1)),
        ("even", 0.0, (2, 3, 2, 2, 1)),
        ("even", 1.0, (1, 6, 5, 4, 2)),
    ],
)
def test_a_warp_reads_what_was_packed(sample, kind, kept, cut) -> None:
    weight = sample(72, 328, kept, kind, cut=cut)
    assert torch.equal(emulated(weight.arranged), weight.weight.view(torch.int16))


def test_weights_off_the_grid(sample) -> None:
    weight = sample(4104 // 24, 4160 // 8)
    assert torch.equal(emulated(weight.arranged), weight.weight.view(torch.int16))


def test_head_and_tail_of_long_streams(sample) -> None:
    weight = sample(112, 320, cut=(1, 6, 7, 4, 2))
    assert weight.arranged.head == RING
    assert int(weight.arranged.starts[-1]) > 0
    assert torch.equal(emulated(weight.arranged), weight.weight.view(torch.int16))
