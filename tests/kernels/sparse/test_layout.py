"""The bitmap layout: there and back, whatever the mask, and what it costs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress_llm.kernels.sparse import layout
from compress_llm.kernels.sparse.geometry import Geometry

KINDS = ("even", "skewed", "rows", "side", "2:4")


def bits(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.int16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("cut", [None, (3, 2, 3, 2, 2), (5, 1, 1, 1, 1), (1, 5, 7, 7, 1)])
def test_there_and_back(sample, kind, kept, cut) -> None:
    weight = sample(200, 320, kept, kind, cut=cut)
    assert torch.equal(bits(layout.dense(weight.arranged)), bits(weight.weight))


@pytest.mark.parametrize("kept", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nothing_and_everything(sample, kept, dtype) -> None:
    weight = sample(40, 136, kept, dtype=dtype)
    assert layout.dense(weight.arranged).dtype == dtype
    assert torch.equal(bits(layout.dense(weight.arranged)), bits(weight.weight))


@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 200),
    cut=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.integers(1, 2)),
    words=st.integers(0, 2**31 - 1),
)
def test_any_shape_and_cut(rows, columns, cut, words) -> None:
    warps, groups, tiles, together, unroll = cut
    together = min(together, tiles, 8 // unroll)
    groups = max(groups, -(-columns // (64 * warps))) * unroll
    generator = torch.Generator().manual_seed(words)
    weight = torch.randint(-(2**15), 2**15, (rows, columns), generator=generator).to(torch.int16)
    weight[torch.rand(rows, columns, generator=generator) < torch.rand(rows, 1, generator=generator)] = 0
    arranged = layout.arrange(weight.view(torch.bfloat16), cut=Geometry(warps, groups, tiles, together, unroll))
    assert torch.equal(bits(layout.dense(arranged)), weight)


def test_a_negative_zero_is_a_number_and_a_mask_has_the_last_word() -> None:
    weight = torch.tensor([[-0.0, 0.0, 1.0, 2.0]]).bfloat16()
    assert torch.equal(bits(layout.dense(layout.arrange(weight))), bits(weight))
    kept = torch.tensor([[False, True, True, False]])
    assert torch.equal(layout.dense(layout.arrange(weight, kept)), torch.tensor([[0.0, 0.0, 1.0, 0.0]]).bfloat16())


@pytest.mark.parametrize("kind", ["even", "skewed"])
def test_size_of_a_weight_cut_as_large_ones_are(sample, kind) -> None:
    weight = sample(448, 4096, 0.5, kind)
    packed = layout.arrange(weight.weight, cut=Geometry(16, 4, 7, 7, 1))
    assert packed.nbytes / weight.weight.numel() < 1.15


def test_rows_that_come_in_parts(sample) -> None:
    weight = sample(200, 320).weight
    found = layout.gathered(weight.float().split(64), (200, 320), torch.bfloat16, "cpu")
    assert torch.equal(bits(found), bits(weight))
    for parts in (weight[:199].split(64), [weight, weight[:1]]):
        with pytest.raises(ValueError, match="200"):
            layout.gathered(parts, (200, 320), torch.bfloat16, "cpu")


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="16-bit"):
        layout.arrange(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="mask"):
        layout.arrange(torch.zeros(2, 2).half(), torch.ones(2, 3).bool())
    for cut in (Geometry(1, 2, 1, 1, 1), Geometry(1, 3, 1, 1, 2), Geometry(1, 3, 1, 2, 1)):
        with pytest.raises(ValueError, match="cover"):
            layout.arrange(torch.zeros(2, 129).half(), cut=cut)


def test_copies(sample) -> None:
    packed = sample(200, 320).arranged
    for other in (packed.clone(), packed.to("cpu")):
        assert other.cut == packed.cut
        assert torch.equal(layout.dense(other), layout.dense(packed))
    assert packed.clone().values.data_ptr() != packed.values.data_ptr()
