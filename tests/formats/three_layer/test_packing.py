"""The three layers: exact for every weight, as small as promised, and strict with what is read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from compress_llm.formats.errors import InputError
from compress_llm.formats.layout import held_to
from compress_llm.formats.pruned import Pruned
from compress_llm.formats.scheme import SCHEMES
from compress_llm.formats.sparsity import Sparsity
from compress_llm.formats.three_layer.packing import ThreeLayer, expected, shares

from ..sparse_weights import ADVERSARIAL, adversarial, any_weight, random_weight, same_bits

SCHEME = SCHEMES["SPARSE50"]
PACKING = ThreeLayer()


def round_trip(weight: Tensor) -> dict[str, Tensor]:
    tensors = PACKING.pack(Pruned(SCHEME, weight))
    shape = (weight.shape[0], weight.shape[1])
    held_to(tensors, PACKING.layout(SCHEME, *shape, weight.dtype))
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    assert same_bits(PACKING.unpack(tensors, SCHEME, shape).weight, weight)
    return tensors


@settings(deadline=None, max_examples=60)
@given(weight=any_weight())
def test_unpacking_inverts_packing(weight: Tensor) -> None:
    round_trip(weight)


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_masks(name: str) -> None:
    round_trip(adversarial(name))


def bytes_a_weight(tensors: dict[str, Tensor], weight: Tensor) -> float:
    return sum(tensor.nbytes for tensor in tensors.values()) / weight.numel()


def test_size_and_shares_of_a_random_mask() -> None:
    weight = torch.randn(512, 1024).to(torch.bfloat16).masked_fill(torch.rand(512, 1024) < 0.5, 0.0)
    tensors = round_trip(weight)
    found = shares(tensors)
    assert bytes_a_weight(tensors, weight) < 1.31
    assert found["residual"] < 0.01
    assert found["dummies"] == pytest.approx(0.021, abs=0.002)
    assert found["slot_filling"] == pytest.approx(0.183, abs=0.005)
    assert found["sparsity"] == pytest.approx(0.5, abs=0.005)


def test_a_skewed_mask_is_balanced_by_the_order_of_its_columns() -> None:
    generator = torch.Generator().manual_seed(0)
    density = torch.rand(512, generator=generator)
    mask = torch.rand(256, 512, generator=generator) < density
    weight = torch.randn(256, 512, generator=generator).to(torch.bfloat16).masked_fill(~mask, 0.0)
    tensors = round_trip(weight)
    assert bytes_a_weight(tensors, weight) < 1.30
    assert shares(tensors)["residual"] < 0.02


def test_a_pattern_of_two_in_four_needs_the_first_layer_only() -> None:
    keep = torch.rand(128, 64, 4).argsort(-1) < 2
    weight = torch.randn(128, 256).to(torch.bfloat16).masked_fill(~keep.view(128, 256), 0.0)
    tensors = round_trip(weight)
    assert tensors["weight_steps"].numel() == tensors["weight_residual"].numel() == 0
    assert tensors["weight_permutation"].tolist() == list(range(256))


@pytest.mark.parametrize(
    ("sparsity", "found"),
    [
        (Sparsity(), (0.375, 0.0)),
        (Sparsity(0.4), (0.2048, 0.4)),
        (Sparsity(pattern="2:4"), (0.0, 0.0)),
        (Sparsity(pattern="4:8"), (18 / 70, 0.0)),
    ],
)
def test_what_to_expect_of_random_masks(sparsity: Sparsity, found: tuple[float, float]) -> None:
    assert expected(sparsity) == pytest.approx(found, abs=1e-4)
    scheme = replace(SCHEME, sparsity=sparsity)
    weight = torch.ones(256, 512, dtype=torch.bfloat16)
    if sparsity.group is None:
        weight[torch.rand(256, 512) < sparsity.ratio] = 0
    else:
        neighbours = sparsity.group[1]
        weight[(torch.rand(256, 512 // neighbours, neighbours).argsort(-1) < neighbours // 2).view(256, 512)] = 0
    layout = PACKING.layout(scheme, 256, 512, torch.bfloat16)
    guess = sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in layout.values()) / weight.numel()
    assert bytes_a_weight(PACKING.pack(Pruned(scheme, weight)), weight) == pytest.approx(guess, rel=0.02)


def broken(suffix: str, index: int, value: int) -> dict[str, Tensor]:
    tensors = PACKING.pack(Pruned(SCHEME, random_weight((70, 132), 0.6)))
    tensors[suffix] = tensors[suffix].clone()
    tensors[suffix][index] = value
    return tensors


@pytest.mark.parametrize(
    ("suffix", "index", "value"),
    [
        ("weight_permutation", 0, 131),
        ("weight_permutation", 0, -1),
        ("weight_positions", 0, 0),
        ("weight_steps", -1, 0),
        ("weight_step_offsets", 1, 0),
        ("weight_step_offsets", -1, 0),
        ("weight_residual_columns", 0, 132),
        ("weight_residual_columns", 0, -1),
        ("weight_residual_offsets", 0, 1),
        ("weight_shape", 0, 71),
    ],
)
def test_contents_that_mean_nothing_are_named(suffix: str, index: int, value: int) -> None:
    tensors = broken(suffix, index, value)
    if suffix == "weight_steps":  # enough steps to leave the tile
        tensors[suffix] = torch.full_like(tensors[suffix], 0xFF)
    if suffix == "weight_step_offsets" and index == 1:
        tensors[suffix][2] = -1
    with pytest.raises(InputError) as caught:
        PACKING.unpack(tensors, SCHEME, (70, 132))
    assert caught.value.key == suffix


def test_missing_tensors_are_named() -> None:
    tensors = PACKING.pack(Pruned(SCHEME, random_weight((9, 10), 0.5)))
    for suffix in tensors:
        with pytest.raises(InputError) as caught:
            PACKING.unpack({key: value for key, value in tensors.items() if key != suffix}, SCHEME, (9, 10))
        assert caught.value.key == suffix
