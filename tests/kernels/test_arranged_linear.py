"""Linears in the layout of a GPU's kernels, here on the CPU: alone and merged they say what the packed ones said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compress_llm.compress_cli.runs.bench_kernels import random_weight
from compress_llm.formats.architectures import architecture
from compress_llm.formats.errors import InputError
from compress_llm.formats.scheme import Scheme, scheme
from compress_llm.kernels.arranged_linear import ArrangedLinear, Layouts, SharedPart
from compress_llm.kernels.packed_linear import PackedLinear
from compress_llm.kernels.registry import prefer

FACTS = architecture({"model_type": "llama"}, {})
WIDTH = 96


def linear(rows: int, row: Scheme, bias: bool = False) -> PackedLinear:
    tensors = random_weight(row, (rows, WIDTH), torch.bfloat16, torch.device("cpu"))
    return PackedLinear(row, (rows, WIDTH), tensors, torch.ones(rows).bfloat16() if bias else None)


def block(row: Scheme, key: Scheme | None = None) -> nn.Module:
    """One decoder block with an attention of packed linears."""
    model, layer = nn.Module(), nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList([layer])
    layer.self_attn = nn.Module()
    layer.self_attn.q_proj = linear(64, row, bias=True)
    layer.self_attn.k_proj = linear(32, key or row, bias=True)
    layer.self_attn.v_proj = linear(40, row, bias=True)
    layer.self_attn.o_proj = linear(WIDTH, row)
    return model


def attention(model: nn.Module) -> nn.Module:
    return model.model.layers[0].self_attn


NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize(
    "name",
    [
        "W4A16",
        "W4A16_ASYM",
        "W8A16",
        "W8A8",
        "W8A8_STATIC",
        "NVFP4A16",
        "NVFP4",
        "MXFP4",
        "MXFP8A16",
        "FP8",
        "FP8_DYNAMIC",
        "W4AFP8",
        "SPARSE50_W4A16",
    ],
)
def test_products_stay_what_they_were(name: str) -> None:
    row = scheme(name).with_group(32) if scheme(name).groupable and scheme(name).group_size else scheme(name)
    model = block(row)
    part = attention(model)
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = {name: getattr(part, name)(x).float() for name in NAMES}
    rows = part.o_proj.weight_rows(5, 70)
    Layouts(FACTS, torch.bfloat16).arrange(model)
    for key, y in before.items():
        difference = getattr(part, key)(x).float() - y
        assert difference.norm() <= (5e-3 if row.activation or row.global_scale else 0) * y.norm(), key
    assert torch.allclose(part.o_proj.weight_rows(5, 70), rows, rtol=2**-22 if row.global_scale else 0, atol=0)
    assert isinstance(part.o_proj, ArrangedLinear)
    assert isinstance(part.k_proj, SharedPart) == (
        name not in ("W8A8_STATIC", "FP8", "NVFP4")
    )  # one input scale a linear: not one product


def test_linears_that_disagree_run_alone() -> None:
    model = block(scheme("W4A16").with_group(32), key=scheme("W8A16"))
    Layouts(FACTS, torch.bfloat16).arrange(model)
    assert all(isinstance(getattr(attention(model), name), ArrangedLinear) for name in NAMES)


@pytest.mark.parametrize("name", ["W8A8_BLOCK", "FP8_BLOCK"])
@pytest.mark.parametrize("rows", [(128, 256, 128), (128, 72, 128)])
def test_blocks_of_rows_are_fused_where_they_end_with_their_linears(name: str, rows: tuple[int, ...]) -> None:
    model, x = nn.Module(), torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    model.model, layer = nn.Module(), nn.Module()
    model.model.layers, layer.self_attn = nn.ModuleList([layer]), nn.Module()
    for key, count in zip(NAMES, rows, strict=False):
        tensors = random_weight(scheme(name), (count, 128), torch.bfloat16, torch.device("cpu"))
        layer.self_attn.add_module(key, PackedLinear(scheme(name), (count, 128), tensors))
    part = attention(model)
    before = [getattr(part, key)(x).float() for key in NAMES[:3]]
    Layouts(FACTS, torch.bfloat16).arrange(model)
    assert isinstance(part.k_proj, SharedPart) == (72 not in rows)
    for key, y in zip(NAMES, before, strict=False):
        assert (getattr(part, key)(x).float() - y).norm() <= 5e-3 * y.norm()


def test_what_has_no_layout_stays_unless_kernels_were_asked_for() -> None:
    model = block(scheme("W4A16").with_group(16))
    Layouts(FACTS, torch.bfloat16).arrange(model)
    assert all(type(getattr(attention(model), name)) is PackedLinear for name in NAMES)
    with prefer("cuda"), pytest.raises(InputError, match="no layout for groups of 16"):
        Layouts(FACTS, torch.bfloat16).arrange(model)
    model = block(scheme("W4A16").with_group(32))
    Layouts(FACTS, torch.float32).arrange(model)
    assert type(attention(model).q_proj) is PackedLinear


def test_parts_share_one_product_and_never_an_old_one() -> None:
    model = block(scheme("W4A16").with_group(32))
    Layouts(FACTS, torch.bfloat16).arrange(model)
    part = attention(model)
    shared = part.q_proj.shared
    runs: list[int] = []
    shared.linear.register_forward_hook(lambda *given: runs.append(1))
    x = torch.randn(2, WIDTH).bfloat16()
    first = part.q_proj(x)
    part.k_proj(x)
    part.v_proj(x)
    assert len(runs) == 1
    assert shared._output is None
    part.q_proj(x)
    x += 1
    assert not torch.equal(part.q_proj(x), first)
    assert len(runs) == 3


def test_the_layout_moves_and_keeps_its_types_and_is_never_saved() -> None:
    module = linear(64, scheme("W4A16").with_group(32), bias=True)
    model = nn.Module()
    model.only = module
    Layouts(FACTS, torch.bfloat16).arrange(model)
    assert list(model.state_dict()) == ["only.bias"]
    model.half()
    assert (model.only.scales.dtype, model.only.bias.dtype) == (torch.bfloat16, torch.float16)
    assert "scheme=W4A16" in repr(model)
