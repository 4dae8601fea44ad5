"""Fragment order against the manual's tables of matrix operands, element by element."""

from __future__ import annotations

import pytest
import torch

from compress_llm.kernels.lowbit import layout


def place_of_code(bits: int, n: int, k: int) -> tuple[tuple[int, ...], int]:
    """Index of the byte that holds code (n, k), and its lowest bit, from the A operand of mma.m16n8k16.

    Register 2 h + p of lane 4 r + c holds rows r + 8 p, columns 2 c + 8 h and the next.
    """
    steps = 16 // bits
    chunk, step = k % 128 // (16 * steps), k // 16 % steps
    lane, register = 4 * (n % 8) + k % 8 // 2, 2 * (k % 16 // 8) + n % 16 // 8
    bit = 32 * register + 16 * (k % 2) + bits * step
    return (n // 128, k // 128, n % 128 // 16, chunk, lane, bit // 8), bit % 8


def place_of_byte(n: int, k: int) -> tuple[int, ...]:
    """The same for int8 activations, from mma.m16n8k32: a register holds columns 4 c + 16 h and the next three."""
    lane, register = 4 * (n % 8) + k % 16 // 4, 2 * (k % 32 // 16) + n % 16 // 8
    return n // 128, k // 128, n % 128 // 16, k % 128 // 32, lane, 4 * register + k % 4


def some_places(rows: int, columns: int) -> list[tuple[int, int]]:
    generator = torch.Generator().manual_seed(0)
    n = torch.randint(rows, (400,), generator=generator).tolist()
    k = torch.randint(columns, (400,), generator=generator).tolist()
    return list(zip(n, k, strict=True))


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_lie_where_matrix_instructions_read_them(sample, bits: int) -> None:
    weight = sample(200, 288, bits, 32)
    assert weight.arranged.codes.shape == (2, 3, 8, bits // 2, 32, 16)
    for n, k in some_places(200, 288):
        index, bit = place_of_code(bits, n, k)
        stored = int(weight.arranged.codes[index]) >> bit & ((1 << bits) - 1)
        assert stored == (int(weight.codes[n, k]) + (8 if bits == 4 else 0)) % (1 << bits)


def test_codes_for_integer_activations(sample) -> None:
    weight = sample(200, 288, 8, 0, narrow=True)
    for n, k in some_places(200, 288):
        assert int(weight.arranged.codes[place_of_byte(n, k)]) == int(weight.codes[n, k]) % 256


@pytest.mark.parametrize("group", [32, 64, 128, 0])
def test_scales_and_zeros_lie_in_pairs_of_rows(sample, group: int) -> None:
    weight = sample(200, 384, 4, group, "int")
    for n, k in some_places(200, 384):
        number = k // group if group else 0
        block, inner = divmod(number, 128 // group) if group else (0, 0)
        at = (n // 128, block, n % 128 // 16, n % 8, inner)
        assert weight.arranged.scales[at][n % 16 // 8] == weight.scale[n, number]
        assert int(weight.arranged.zeros[at]) >> (4 * (n % 16 // 8)) & 15 == int(weight.zero[n, number]) + 8


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128, 256, 0])
@pytest.mark.parametrize("zero", [None, "int", "float"])
def test_there_and_back(sample, bits: int, group: int, zero: str | None) -> None:
    columns = 512 if group == 256 else 384
    weight = sample(136, columns, bits, group, zero)
    assert torch.equal(layout.restore(weight.arranged)[0], weight.codes)
    assert torch.equal(layout.dequantize(weight.arranged, torch.float64), weight.exact.float().double())


def test_padding_weighs_nothing(sample) -> None:
    scales = sample(130, 160, 4, 32, "int").arranged.scales
    assert scales.count_nonzero() == 130 * 5


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "mxfp8", "fp8", "narrow"])
def test_floating_point_weights_there_and_back(float_sample, kind: str) -> None:
    weight = float_sample(kind, 136, 320)
    arranged = weight.arranged
    assert (arranged.bits, arranged.floating, arranged.narrow) == (weight.bits, True, kind == "narrow")
    assert torch.allclose(layout.dequantize(arranged).double(), weight.exact, rtol=2**-22, atol=0)
    assert torch.equal(layout.dequantize_rows(arranged, 37, 133), layout.dequantize(arranged)[37:133])
    assert arranged.scale_bytes == {"nvfp4": 1024, "mxfp4": 512, "mxfp8": 512}.get(kind, 0)


@pytest.mark.parametrize("narrow", [False, True])
def test_rows_in_parts_are_the_same(sample, narrow: bool) -> None:
    weight = sample(300, 256, 8 if narrow else 4, 0 if narrow else 64, None if narrow else "int", narrow=narrow)
    whole = None
    for start in range(0, 300, 128):
        rows = slice(start, min(300, start + 128))
        if narrow:
            part = layout.arrange_narrow(weight.codes[rows], weight.scale[rows])
        else:
            part = layout.arrange(weight.codes[rows], weight.scale[rows], weight.zero[rows], 4, 64, torch.float16)
        whole = layout.place(whole, part, start, 300)
    assert torch.equal(whole.codes, weight.arranged.codes)
    assert torch.equal(layout.dequantize(whole), layout.dequantize(weight.arranged))
    assert torch.equal(layout.dequantize_rows(whole, 37, 201), layout.dequantize(whole)[37:201])


def test_floating_point_rows_in_parts_are_the_same(float_sample) -> None:
    weight, whole = float_sample("nvfp4", 300, 256), None
    for start in range(0, 300, 128):
        rows = slice(start, min(300, start + 128))
        part = layout.arrange_floating(weight.codes[rows], weight.scale[rows], weight.factors, 4)
        whole = layout.place(whole, part, start, 300)
    assert all(torch.equal(a, b) for a, b in zip(whole.tensors, weight.arranged.tensors, strict=True) if a is not None)


@pytest.mark.parametrize("floating", [False, True])
def test_scales_of_blocks_there_and_back(block_sample, floating: bool) -> None:
    weight = block_sample(300, 256, floating)
    assert torch.equal(weight.arranged.scales, weight.scale)
    assert weight.arranged.has_block_scales
    codes, scales, zeros = layout.restore(weight.arranged)
    assert torch.equal(codes.view(weight.codes.dtype).float(), weight.codes.float())
    assert torch.equal(scales, weight.by_row)
    assert zeros is None
    assert torch.allclose(layout.dequantize(weight.arranged).double(), weight.exact, rtol=2**-24, atol=0)
    assert torch.equal(layout.dequantize_rows(weight.arranged, 130, 299), layout.dequantize(weight.arranged)[130:299])


def test_rows_of_blocks_in_parts_are_the_same(block_sample) -> None:
    weight, whole = block_sample(300, 256, True), None
    for start in range(0, 300, 128):
        rows = slice(start, min(300, start + 128))
        part = layout.arrange_narrow(weight.codes[rows], weight.by_row[rows], 128)
        whole = layout.place(whole, part, start, 300)
    assert torch.equal(whole.codes, weight.arranged.codes)
    assert torch.equal(whole.scales, weight.scale)


def test_which_groups_fit() -> None:
    assert [group for group in (0, 8, 16, 32, 64, 96, 128, 192, 256) if layout.supported(group)] == [
        0,
        32,
        64,
        128,
        256,
    ]
