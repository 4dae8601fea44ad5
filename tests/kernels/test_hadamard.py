"""The rotation against SciPy-free definitions: Sylvester's recursion in float64, and compressed-tensors' matrix."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from compress_llm.formats.grids import IntGrid
from compress_llm.formats.packings import packing
from compress_llm.formats.rounded import QParams, round_to_grid
from compress_llm.formats.scheme import SCHEMES, Activation
from compress_llm.kernels.activations import quantize_activation
from compress_llm.kernels.hadamard import rotate, rotated
from compress_llm.kernels.matmul import matmul
from compress_llm.kernels.packed_linear import PackedLinear

BLOCKS = (2, 16, 32, 64, 128)


def exact(x: Tensor, block: int) -> Tensor:
    """x times the matrix, in float64: H of 2n is H of n four times, the last one negative."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    blocks = x.double().reshape(*x.shape[:-1], -1, block)
    return (blocks @ (matrix / block**0.5)).reshape(x.shape)


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("block", BLOCKS)
def test_it_is_the_matrix_product_and_of_compressed_tensors_matrix(block: int) -> None:
    x = noise(3, 5, 256)
    torch.testing.assert_close(rotate(x, block), exact(x, block).float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rotate(x.double(), block), exact(x, block), rtol=1e-13, atol=1e-13)
    assert torch.equal(rotate(x.bfloat16(), block), rotate(x.bfloat16().float(), block).bfloat16())
    theirs = pytest.importorskip("compressed_tensors.transform.utils.hadamard")
    matrix = theirs.deterministic_hadamard_matrix(block, torch.float64)
    torch.testing.assert_close(rotate(torch.eye(block, dtype=torch.float64), block) * block**0.5, matrix)


@pytest.mark.parametrize("block", BLOCKS)
def test_it_is_orthonormal_and_its_own_inverse(block: int) -> None:
    matrix = rotate(torch.eye(256, dtype=torch.float64), block)
    assert torch.equal(matrix, matrix.T)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(256, dtype=torch.float64), rtol=0, atol=1e-14)
    x = noise(7, 256)
    torch.testing.assert_close(rotate(rotate(x, block), block), x, rtol=1e-5, atol=1e-6)


def test_bits_do_not_depend_on_what_is_rotated_together() -> None:
    x = noise(33, 192)
    whole = rotate(x, 64)
    assert torch.equal(torch.cat([rotate(part, 64) for part in x.split(5)]), whole)
    assert torch.equal(torch.cat([rotate(part, 64) for part in x.split(64, dim=1)], dim=1), whole)
    assert rotate(x[:0], 64).shape == (0, 192)


@pytest.mark.parametrize(("features", "block"), [(96, 64), (96, 24), (96, 0), (96, -2)])
def test_a_block_that_does_not_fit(features: int, block: int) -> None:
    with pytest.raises(ValueError, match=f"{features} features"):
        rotate(torch.zeros(2, features), block)


@pytest.mark.parametrize("block", [16, 64])
def test_the_product_is_that_of_rotated_inputs_quantised_afterwards(block: int) -> None:
    activation = Activation(IntGrid(4))
    scheme = replace(SCHEMES["W4A16"].with_group(32), activation=activation, rotation=block)
    x, weight = (noise(6, 128) * 3).round(), noise(24, 128) / 8  # whole numbers: rotated without any rounding
    scale = weight.view(24, 4, 32).abs().amax(-1) / 7
    rounded = round_to_grid(rotated(weight, scheme), scheme, QParams(scale))
    tensors = packing(scheme).pack(rounded)
    turned = quantize_activation(exact(x, block).float(), activation)
    expected = turned.double() @ rounded.dequantize(torch.float64).T
    found = matmul(x, tensors, scheme, (24, 128))
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    linear = PackedLinear(scheme, (24, 128), tensors)
    assert torch.equal(linear(x), found) and f"rotation={block}" in repr(linear)


def test_a_weight_that_the_grid_holds_loses_nothing() -> None:
    """With nothing rounded, the product of rotated inputs with the rotated weight is that of the model."""
    scheme = replace(SCHEMES["W4A16"], rotation=32)
    x, weight = noise(9, 128).double(), noise(40, 128).double()
    found = functional.linear(rotated(x, scheme), rotated(weight, scheme))
    torch.testing.assert_close(found, functional.linear(x, weight), rtol=1e-12, atol=1e-12)
    assert rotated(x, SCHEMES["W4A16"]) is x
