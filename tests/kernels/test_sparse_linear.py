"""Sparse linears in the layout of the kernels, here on the CPU: alone and merged they say what the packed ones said."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from compress_llm.formats.architectures import architecture
from compress_llm.formats.scheme import scheme
from compress_llm.kernels import packed_linear
from compress_llm.kernels.arranged_linear import SharedPart, arrange
from compress_llm.kernels.packed_linear import PackedLinear
from compress_llm.kernels.sparse_linear import SparseLinear, fits, merge_sparse

SPARSE = replace(scheme("W8A16"), packing="compress-bitmap")
WIDTH = 96


@pytest.fixture(autouse=True)
def stored_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights of these tests are dense tensors."""

    def rows(tensors, row, shape, start=0, stop=None, dtype=torch.float32):
        return tensors["weight"][start:stop].to(dtype)

    monkeypatch.setattr(packed_linear, "decode_rows", rows)


def linear(rows: int, bias: bool = True) -> PackedLinear:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, WIDTH, generator=generator).bfloat16()
    weight[torch.rand(rows, WIDTH, generator=generator) < 0.5] = 0
    return PackedLinear(SPARSE, (rows, WIDTH), {"weight": weight}, torch.randn(rows).bfloat16() if bias else None)


def test_merged_rows_lie_below_each_other() -> None:
    parts = [linear(64), linear(1100)]
    weights = [part.weight_rows() for part in parts]
    x, biases = torch.randn(2, 3, WIDTH).bfloat16(), [part.bias for part in parts]
    merged = merge_sparse(parts, torch.bfloat16)
    assert torch.equal(merged.weight_rows(), torch.cat(weights))
    assert torch.equal(merged.weight_rows(60, 70), torch.cat(weights)[60:70])
    assert torch.equal(merged(x), nn.functional.linear(x, torch.cat(weights).bfloat16(), torch.cat(biases)))
    assert all(not part.tensors for part in parts)
    assert not merged.state_dict().keys() - {"bias"}


def test_dtypes_of_values_stay() -> None:
    merged = merge_sparse([linear(40, bias=False)], torch.float16).to(torch.bfloat16)
    assert (merged.values.dtype, merged.masks.dtype, merged.bias) == (torch.float16, torch.int32, None)


def test_linears_of_a_model_with_one_input_become_one() -> None:
    model, layer = nn.Module(), nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList([layer])
    layer.self_attn = nn.Module()
    sizes = {"q_proj": 64, "k_proj": 32, "v_proj": 40, "o_proj": WIDTH}
    for name, rows in sizes.items():
        setattr(layer.self_attn, name, linear(rows))
    x = torch.randn(2, WIDTH).bfloat16()
    before = {name: getattr(layer.self_attn, name).weight_rows().bfloat16() for name in sizes}
    biases = {name: getattr(layer.self_attn, name).bias for name in sizes}
    arrange(model, architecture({"model_type": "llama"}, {}), torch.bfloat16)
    assert isinstance(layer.self_attn.o_proj, SparseLinear)
    assert isinstance(layer.self_attn.k_proj, SharedPart)
    for name, weight in before.items():
        expected = nn.functional.linear(x, weight, biases[name])
        assert torch.allclose(getattr(layer.self_attn, name)(x), expected, rtol=1e-2, atol=1e-2)


def test_which_schemes_fit() -> None:
    assert fits(SPARSE)
    assert not fits(scheme("W4A16"))
