"""Sparse linears in the layout of the kernels, here on the CPU: alone and merged they say what the packed ones said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from compress_llm.compress_cli.runs.quantize import quantize
from compress_llm.compress_cli.runs.recipe import Recipe
from compress_llm.formats.architectures import architecture
from compress_llm.formats.checkpoint import Checkpoint
from compress_llm.formats.packings import packing
from compress_llm.formats.pruned import Pruned
from compress_llm.formats.scheme import SCHEMES, Scheme, scheme
from compress_llm.kernels.arranged_linear import ArrangedLinear, Layouts, SharedPart
from compress_llm.kernels.load import load
from compress_llm.kernels.packed_linear import PackedLinear
from compress_llm.kernels.packed_model import load_packed
from compress_llm.kernels.registry import Pick
from compress_llm.kernels.skeleton import read_config
from compress_llm.kernels.sparse import product
from compress_llm.kernels.sparse.three_layer import ThreeLayer
from compress_llm.kernels.sparse_linear import SparseLinear, fits, merge_sparse

SPARSE = scheme("SPARSE50")
LAYOUTS = [SPARSE.with_layout(name) for name in SPARSE.layouts]
FACTS = architecture({"model_type": "llama"}, {})
WIDTH = 96


def linear(rows: int, bias: bool = True, row: Scheme = SPARSE) -> PackedLinear:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, WIDTH, generator=generator).bfloat16()
    weight[torch.rand(rows, WIDTH, generator=generator) < 0.5] = 0
    tensors = packing(row).pack(Pruned(row, weight))
    return PackedLinear(row, (rows, WIDTH), tensors, torch.randn(rows).bfloat16() if bias else None)


@pytest.mark.parametrize("row", LAYOUTS, ids=lambda row: row.packing)
def test_merged_rows_lie_below_each_other(row: Scheme) -> None:
    parts = [linear(64, row=row), linear(1100, row=row)]
    weights = [part.weight_rows() for part in parts]
    x, biases = torch.randn(2, 3, WIDTH).bfloat16(), [part.bias for part in parts]
    merged = merge_sparse(parts, torch.bfloat16)
    assert torch.equal(merged.weight_rows(), torch.cat(weights))
    assert torch.equal(merged.weight_rows(60, 70), torch.cat(weights)[60:70])
    assert torch.equal(merged(x), nn.functional.linear(x, torch.cat(weights).bfloat16(), torch.cat(biases)))
    assert all(not part.tensors for part in parts)
    assert not merged.state_dict().keys() - {"bias"}


def test_inputs_are_rotated_where_the_checkpoint_says_so() -> None:
    part = linear(64, row=replace(SPARSE, rotation=32))
    x = torch.randn(5, WIDTH).bfloat16()
    expected = part(x)
    assert torch.equal(merge_sparse([part], torch.bfloat16)(x), expected)


def test_three_layers_are_loaded_where_they_are_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, x = [linear(64), linear(40)], torch.randn(2, 3, WIDTH).bfloat16()
    weights, plain = [part.weight_rows() for part in parts], merge_sparse([linear(64), linear(40)], torch.bfloat16)
    with monkeypatch.context() as patched:
        patched.setattr(product, "pick", lambda *given: Pick("three-layer", ""))
        merged = merge_sparse(parts, torch.bfloat16)
    assert isinstance(merged.arranged, ThreeLayer)
    assert set(merged.tensors) == {"tiles", "starts", "rest"}
    assert torch.equal(merged.weight_rows(10, 90), torch.cat(weights)[10:90])
    merged.bias, plain.bias = None, None
    assert torch.equal(merged.to(torch.float16)(x), plain(x))
    for sparse in (merged, plain):
        assert torch.equal(torch.compile(sparse, backend="aot_eager", fullgraph=True)(x), plain(x))


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
    Layouts(FACTS, torch.bfloat16).arrange(model)
    assert isinstance(layer.self_attn.o_proj, SparseLinear)
    assert isinstance(layer.self_attn.k_proj, SharedPart)
    for name, weight in before.items():
        expected = nn.functional.linear(x, weight, biases[name])
        assert torch.allclose(getattr(layer.self_attn, name)(x), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        (Recipe(scheme="SPARSE50", method="magnitude"), SparseLinear),
        (Recipe(scheme="SPARSE50", method="magnitude", sparse_layout="bitmap", sparsity=0.7), SparseLinear),
        (Recipe(scheme="SPARSE50_W4A16", method="magnitude", group_size=32), ArrangedLinear),
    ],
    ids=["three-layer", "bitmap", "codes"],
)
def test_a_directory_arranged_as_on_a_gpu_computes_the_same(
    recipe: Recipe, kind: type[PackedLinear], tiny_llama: Path, tmp_path: Path
) -> None:
    quantize(str(tiny_llama), tmp_path / "out", recipe, device="cpu")
    plain, model = (load(tmp_path / "out", dtype=torch.bfloat16) for _ in range(2))
    Layouts(FACTS, torch.bfloat16).arrange(model)
    layer, before = model.model.layers[1], plain.model.layers[1]
    assert isinstance(layer.mlp.down_proj, kind) and isinstance(layer.self_attn.v_proj, SharedPart)
    assert torch.equal(layer.mlp.down_proj.weight_rows(), before.mlp.down_proj.weight_rows())
    tokens = torch.arange(3, 15).view(2, 6)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, plain(tokens).logits)


def test_what_was_read_makes_room_for_what_comes_next(tiny_llama: Path, tmp_path: Path) -> None:
    quantize(str(tiny_llama), tmp_path / "out", Recipe(scheme="SPARSE50", method="magnitude"), device="cpu")
    checkpoint, layouts = Checkpoint.open(tmp_path / "out"), Layouts(FACTS, torch.bfloat16)
    waiting: list[int] = []

    def ready(model: nn.Module, name: str) -> None:
        layouts.read(model, name)
        waiting.append(sum(type(module) is PackedLinear for module in model.modules()))

    config = read_config(checkpoint.directory, trust_remote_code=False)
    model = load_packed(checkpoint, config, torch.device("cpu"), torch.bfloat16, False, ready)
    assert max(waiting) == 2  # of q, k and v, or of gate and up, the last one is still to come
    assert waiting[-1] == 0
    tokens = torch.arange(3, 15).view(2, 6)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, load(tmp_path / "out", dtype=torch.bfloat16)(tokens).logits)


def test_which_schemes_fit() -> None:
    assert [name for name, row in SCHEMES.items() if fits(row)] == ["SPARSE50"]
    assert all(fits(row) for row in LAYOUTS)
