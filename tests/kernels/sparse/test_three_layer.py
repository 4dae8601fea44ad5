"""Three layers on the device: there and back whatever the mask, and the operands that a warp makes of a tile."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress_llm.kernels.sparse import three_layer
from compress_llm.kernels.sparse.geometry import Geometry

from .conftest import masked

LANES = np.arange(32)
QUAD, ROW = LANES % 4, LANES // 4


def weight_of(mask: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(mask.numel())
    bits = torch.randint(1, 2**15, mask.shape, generator=generator).to(torch.int16)  # not-a-numbers too
    return (bits * mask).view(dtype)


def same(weight: torch.Tensor, cut: Geometry | None = None) -> three_layer.ThreeLayer:
    arranged = three_layer.arrange(weight, cut)
    found = three_layer.dense(arranged)
    assert found.dtype == weight.dtype
    assert torch.equal(found.view(torch.int16), weight.view(torch.int16))
    return arranged


@pytest.mark.parametrize("kind", ["even", "skewed", "rows", "side", "2:4"])
@pytest.mark.parametrize("kept", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("cut", [None, Geometry(2, 4, 3, 1, 1), Geometry(1, 8, 1, 1, 1)])
def test_there_and_back(kind, kept, cut) -> None:
    same(weight_of(masked(200, 320, kept, kind)), cut)


@pytest.mark.parametrize("percent", range(0, 101, 10))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_any_share_of_zeros(percent, dtype) -> None:
    same(weight_of(masked(40, 264, percent / 100), dtype))


@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 600),
    cut=st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 5)),
    seed=st.integers(0, 2**31 - 1),
)
def test_any_shape_and_cut(rows, columns, cut, seed) -> None:
    warps, steps, tiles = cut
    steps = max(steps, -(-columns // (256 * warps)))
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-(2**15), 2**15, (rows, columns), generator=generator).to(torch.int16)
    weight[torch.rand(rows, columns, generator=generator) < torch.rand(rows, 1, generator=generator)] = 0
    same(weight.view(torch.bfloat16), Geometry(warps, 4 * steps, tiles, 1, 1))


def test_what_the_steps_of_a_tile_have_no_room_for_is_left() -> None:
    full_rows = torch.arange(16) < 8
    weight = weight_of(full_rows[:, None].expand(16, 256))  # as many empty slots as surplus, 1024 each
    arranged = same(weight)
    assert arranged.rest.numel() == 1024 - 512
    far = torch.zeros(16, 256, dtype=torch.bool)
    far[8:, 252:] = True  # sources lie far before their destinations
    same(weight_of(far))


def test_everything_left_of_a_full_weight() -> None:
    arranged = same(weight_of(torch.ones(16, 512, dtype=torch.bool)))
    assert arranged.rest.numel() == 2 * 2048
    assert arranged.starts.tolist() == [0, 2048, 4096, 4096, 4096]


def test_a_negative_zero_is_a_number() -> None:
    same(torch.tensor([[-0.0, 0.0, 1.0, -0.0, -0.0]]).bfloat16())


@pytest.mark.parametrize(("kind", "most"), [("even", 1.296), ("skewed", 1.34)])
def test_size_of_a_weight_on_the_grid(kind, most) -> None:
    mask = masked(448, 4096, 0.5, kind)
    assert same(weight_of(mask), Geometry(8, 8, 7, 1, 1)).nbytes / mask.numel() < most


def test_cuts_of_large_weights() -> None:
    shapes = [(14336, 4096), (4096, 14336), (8192, 8192)]
    cuts = [three_layer.geometry(*shape) for shape in shapes]
    assert [(cut.warps, cut.groups // 4, cut.tiles) for cut in cuts] == [(8, 2, 7), (14, 4, 2), (8, 4, 4)]
    assert all(cut.inputs == inputs for cut, (_, inputs) in zip(cuts, shapes, strict=True))


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="16-bit"):
        three_layer.arrange(torch.zeros(2, 2))
    for cut in (Geometry(1, 4, 1, 1, 1), Geometry(1, 6, 1, 1, 1)):
        with pytest.raises(ValueError, match="cover"):
            three_layer.arrange(torch.zeros(2, 300).half(), cut)


def test_copies() -> None:
    packed = three_layer.arrange(weight_of(masked(200, 320)))
    for other in (packed.clone(), packed.to("cpu")):
        assert other.cut == packed.cut
        assert torch.equal(three_layer.dense(other).view(torch.int16), three_layer.dense(packed).view(torch.int16))
    assert packed.clone().tiles.data_ptr() != packed.tiles.data_ptr()


def moved(tile: np.ndarray, rest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What layers.cuh makes of a tile's slots: the two operands, uint16 [2048]."""
    kept, others = tile[:4096].copy().view("<u2"), np.zeros(2048, dtype=np.uint16)
    for lane in range(32):
        passed = int(tile[4608 + lane * 4 :][:4].view("<u4")[0])
        source, destination = passed & 0xFFFF, passed >> 16
        for step in tile[4736 + lane * 16 :][:16].tolist():
            low, high = step & 15, step >> 4
            source += 2 * (low if step else 15)
            destination += 2 * (high if step else 15)
            if low and high:
                others[destination // 2 - 1], kept[source // 2 - 1] = kept[source // 2 - 1], 0
    for word in rest.view(np.uint32).tolist():
        assert others[(word & 0xFFFF) // 2] == 0
        others[(word & 0xFFFF) // 2] = word >> 16
    return kept, others


def operand(slots: np.ndarray, words: np.ndarray, second: int) -> np.ndarray:
    """[16 rows, 32 inputs] as mma.sp m16n8k32 reads a lane's eight slots and the words that `second` selects."""
    a = np.zeros((16, 32), dtype=np.uint16)
    for lane in range(32):
        for register in range(4):
            row, group = lane // 4 + register % 2 * 8, lane % 4 + register // 2 * 4
            word = int(words[lane // 4 * 4 + second * 2 + group // 4])
            pair = word >> (register % 2 * 16 + group % 4 * 4) & 15
            assert pair & 3 < pair >> 2
            for s, position in enumerate((pair & 3, pair >> 2)):
                a[row, group * 4 + position] = slots[lane * 8 + register * 2 + s]
    return a


def inputs_of(second: int) -> np.ndarray:
    """Which of 64 inputs is at each of the 32 places of an instruction: what register b of a lane holds of x."""
    inputs = np.zeros(32, dtype=np.int64)
    for quad in range(4):
        for register in range(4):
            for e in range(2):
                inputs[register * 8 + quad * 2 + e] = second * 32 + quad * 8 + register * 2 + e
    return inputs


@pytest.mark.parametrize(("kind", "kept"), [("even", 0.5), ("skewed", 0.5), ("even", 0.8), ("rows", 0.4)])
def test_a_warp_multiplies_what_was_packed(kind, kept) -> None:
    weight = weight_of(masked(40, 600, kept, kind))
    packed = three_layer.arrange(weight, Geometry(2, 8, 2, 1, 1))
    tiles, starts = packed.tiles.view(torch.uint8).numpy(), packed.starts.tolist()
    dense = np.zeros((64, 1024), dtype=np.uint16)
    for number, tile in enumerate(tiles):
        band, warp, step, row = np.unravel_index(number, (2, 2, 2, 2))
        kept_slots, others = moved(tile, packed.rest[starts[number] : starts[number + 1]].numpy())
        for piece in range(4):
            words = tile[4096 + piece * 128 :][:128].view("<u4").astype(np.uint64)
            crossed = (~words >> np.uint64(3) | words >> np.uint64(1)) & np.uint64(0x11111111)
            rest = (words ^ np.uint64(0x55555555) ^ crossed * np.uint64(15)) & np.uint64(0xFFFFFFFF)
            for second in range(2):
                part = slice((piece * 2 + second) * 256, (piece * 2 + second + 1) * 256)
                a = operand(kept_slots[part], words, second)
                b = operand(others[part], rest, second)
                assert not np.any((a != 0) & (b != 0))
                columns = (warp * 2 + step) * 256 + piece * 64 + inputs_of(second)
                dense[(band * 2 + row) * 16 + np.arange(16)[:, None], columns] = a | b
    assert torch.equal(torch.from_numpy(dense.view(np.int16))[:40, :600], weight.view(torch.int16))
