"""Dense packing against compressed-tensors' packer, and as its own inverse."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compress_llm.formats.bits import pack_bytes, pack_rows, unpack_bytes, unpack_rows, words

WIDTHS = [1, 2, 4, 8]


def random_codes(rows: int, count: int, bits: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    half = 1 << (bits - 1)
    return torch.randint(-half, half, (rows, count), generator=generator).to(torch.int8)


@settings(deadline=None, max_examples=80)
@given(rows=st.integers(0, 9), count=st.integers(0, 70), bits=st.sampled_from(WIDTHS), seed=st.integers(0, 2**32 - 1))
def test_unpacking_inverts_packing_and_both_agree_with_compressed_tensors(rows, count, bits, seed):
    codes = random_codes(rows, count, bits, seed)
    packed = pack_rows(codes, bits)
    assert packed.is_contiguous()
    assert packed.shape == (rows, words(count, bits))
    assert torch.equal(unpack_rows(packed, bits, count), codes)
    if rows and count:
        assert torch.equal(packed, pack_to_int32(codes, bits))
        assert torch.equal(unpack_from_int32(packed, bits, codes.shape), codes)


def test_bit_order_by_hand():
    codes = torch.tensor([[-8, -7, 7, 0, 1, -1, 2, -2, 5]], dtype=torch.int8)
    nibbles = [0, 1, 15, 8, 9, 7, 10, 6, 13]
    first = sum(nibble << (4 * place) for place, nibble in enumerate(nibbles[:8]))
    assert [word % 2**32 for word in pack_rows(codes, 4)[0].tolist()] == [first, nibbles[8]]
    assert pack_rows(torch.tensor([[-128, 127]], dtype=torch.int8), 8).tolist() == [[0xFF00]]


@pytest.mark.parametrize("bits", WIDTHS)
def test_strided_views_pack_like_their_copies(bits):
    codes = random_codes(40, 22, bits)
    for view in (codes.T, codes[::2, 1::3], codes[5:, 3:]):
        packed = pack_rows(view, bits)
        assert torch.equal(packed, pack_rows(view.contiguous(), bits))
        assert torch.equal(unpack_rows(packed.T.contiguous().T, bits, view.shape[1]), view)


@pytest.mark.parametrize(("bits", "code"), [(4, 8), (4, -9), (2, 2), (1, 1), (4, 127)])
def test_a_code_that_would_spill_into_its_neighbours_is_refused(bits, code):
    codes = torch.zeros(2, 5, dtype=torch.int8)
    codes[1, 2] = code
    with pytest.raises(ValueError, match=f"outside of {bits} bits"):
        pack_rows(codes, bits)


def test_malformed_arguments_are_refused():
    with pytest.raises(ValueError, match="int8 and two-dimensional"):
        pack_rows(torch.zeros(2, 2), 4)
    with pytest.raises(ValueError, match="int8 and two-dimensional"):
        pack_rows(torch.zeros(4, dtype=torch.int8), 4)
    with pytest.raises(ValueError, match="divide eight"):
        pack_rows(torch.zeros(2, 2, dtype=torch.int8), 3)
    with pytest.raises(ValueError, match="9 codes of 4 bits"):
        unpack_rows(torch.zeros(2, 1, dtype=torch.int32), 4, 9)
    with pytest.raises(ValueError, match=r"torch\.int64"):
        unpack_rows(torch.zeros(2, 1, dtype=torch.int64), 4, 8)


class LargestAllocation(TorchDispatchMode):
    """Bytes of the largest tensor that any operation returns."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.nbytes = max(self.nbytes, leaf.nbytes)
        return result


@pytest.mark.parametrize("bits", WIDTHS)
def test_nothing_wider_than_the_codes_is_ever_allocated(bits):
    codes = random_codes(64, 250, bits)
    with LargestAllocation() as watch:
        unpack_rows(pack_rows(codes, bits), bits, 250)
    assert watch.nbytes <= 64 * words(250, 8) * 4


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 33])
def test_bytes_of_one_row_end_with_its_last_code(bits: int, count: int) -> None:
    codes = torch.randint(-(1 << bits - 1), 1 << bits - 1, (count,)).to(torch.int8)
    packed = pack_bytes(codes, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (-(-count * bits // 8),)
    assert torch.equal(unpack_bytes(packed, bits, count), codes)
