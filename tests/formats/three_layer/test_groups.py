"""Groups of four: every mask there is, one by one."""

import pytest
import torch

from compress_llm.formats.three_layer.groups import complement, join, pack_pairs, split, unpack_pairs


def test_every_mask_keeps_two_positions_and_all_values():
    bits = torch.tensor([[10 + place if mask >> place & 1 else 0 for place in range(4)] for mask in range(16)])
    groups = split(bits.to(torch.int16))
    assert torch.equal(join(groups), bits.to(torch.int16))
    for mask in range(16):
        first, second = int(groups.pairs[mask, 0]) & 3, int(groups.pairs[mask, 0]) >> 2
        assert first < second
        assert groups.kept[mask, 0].tolist() == [int(bits[mask, first]), int(bits[mask, second])]
        count = mask.bit_count()
        assert int((groups.kept[mask] != 0).sum()) == min(count, 2)
        assert int((groups.surplus[mask] != 0).sum()) == max(count - 2, 0)


def test_the_complement_is_what_a_pair_leaves():
    for first in range(4):
        for second in range(first + 1, 4):
            found = complement(torch.tensor([[first | second << 2]], dtype=torch.uint8)).flatten().tolist()
            assert found[:2] == [first, second] and sorted(found) == [0, 1, 2, 3] and found[2] < found[3]
    for first, second in ((0, 0), (2, 1), (3, 3)):
        with pytest.raises(ValueError, match="ascending"):
            complement(torch.tensor([[first | second << 2]], dtype=torch.uint8))


@pytest.mark.parametrize("groups", [1, 2, 5])
def test_pairs_are_two_a_byte_the_first_low(groups):
    pairs = torch.randint(0, 16, (3, groups), dtype=torch.uint8)
    packed = pack_pairs(pairs)
    assert packed.shape == (3, -(-groups // 2))
    assert int(packed[1, 0]) & 15 == int(pairs[1, 0])
    assert torch.equal(unpack_pairs(packed, groups), pairs)
