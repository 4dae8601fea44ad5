"""How a linear is stored is read from names, config and headers, and what does not fit is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from compress_llm.compress_cli.runs.stored import is_finite, packed_linear, packed_names, rows_at_a_time, schemes
from compress_llm.formats.checkpoint import Checkpoint
from compress_llm.formats.errors import InputError
from compress_llm.formats.packings import packing
from compress_llm.formats.quantization_config import build
from compress_llm.formats.rounded import QParams, Rounded
from compress_llm.formats.scheme import Scheme, scheme

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
INT4, W8A8 = scheme("W4A16").with_group(16), scheme("W8A8")


def tensors_of(row: Scheme, name: str, out_features: int = 6, in_features: int = 32) -> dict[str, Tensor]:
    codes = torch.randint(-8, 8, (out_features, in_features), dtype=torch.int8)
    params = QParams(torch.ones(out_features, row.groups(in_features), dtype=torch.bfloat16))
    return {f"{name}.{suffix}": tensor for suffix, tensor in packing(row).pack(Rounded(row, codes, params)).items()}


def opened(folder: Path, tensors: dict[str, Tensor], config: dict | None) -> Checkpoint:
    quantization = {} if config is None else {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **quantization}))
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint.open(folder)


def test_packed_linears_and_plain_ones(tmp_path: Path) -> None:
    tensors = {**tensors_of(INT4, UP), **tensors_of(W8A8, DOWN), f"{UP}.bias": torch.zeros(6)}
    tensors["model.layers.0.self_attn.o_proj.weight"] = torch.zeros(4, 4)
    config = build({UP: INT4, DOWN: W8A8}, ["model.layers.0.self_attn.o_proj"])
    checkpoint = opened(tmp_path, tensors, config)
    known = schemes(checkpoint)
    assert known == {UP: INT4, DOWN: W8A8}
    assert packed_names(checkpoint) == {UP, DOWN}
    up, down = (packed_linear(checkpoint, name, known[name]) for name in (UP, DOWN))
    assert up.tensors.keys() == {"weight_packed", "weight_scale", "weight_shape"}
    assert (up.shape, down.shape) == ((6, 32), (6, 32))
    assert up.nbytes == 6 * 4 * 4 + 6 * 2 * 2 + 16
    assert down.bits_per_weight == 8 * (6 * 32 + 6 * 2) / (6 * 32)
    assert up.unpack(up.read(checkpoint)).shape == (6, 32)


def test_a_plain_model_has_no_schemes(tmp_path: Path) -> None:
    assert schemes(opened(tmp_path, {"model.norm.weight": torch.ones(2)}, None)) == {}


def test_without_weight_shape_the_bits_tell_the_shape(tmp_path: Path) -> None:
    tensors = tensors_of(INT4, UP)
    del tensors[f"{UP}.weight_shape"]
    checkpoint = opened(tmp_path, tensors, build({UP: INT4}, []))
    assert packed_linear(checkpoint, UP, INT4).shape == (6, 32)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"weight_scale": None}, "is missing, while config.json says W4A16"),
        ({"weight_shape": torch.tensor([0, 32])}, "is no shape of a weight"),
        ({"weight_shape": torch.tensor([6.0, 32.0])}, "is no shape of a weight"),
        ({"weight_shape": torch.tensor([6, 32, 1])}, "is no shape of a weight"),
        ({"weight_shape": None, "weight_packed": None}, "is missing or no matrix"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, changes: dict[str, Tensor | None], cause: str) -> None:
    tensors: dict[str, Tensor | None] = {**tensors_of(INT4, UP)}
    tensors.update({f"{UP}.{suffix}": tensor for suffix, tensor in changes.items()})
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    checkpoint = opened(tmp_path, {"model.norm.weight": torch.ones(2), **kept}, build({UP: INT4}, []))
    with pytest.raises(InputError, match=cause):
        packed_linear(checkpoint, UP, INT4)


@pytest.mark.parametrize(("row", "gone"), [(INT4, "weight_scale"), (INT4, "weight_packed"), (W8A8, "weight_scale")])
def test_what_is_left_of_a_packed_linear_is_still_one(tmp_path: Path, row: Scheme, gone: str) -> None:
    tensors = {"model.norm.weight": torch.ones(2), **tensors_of(row, UP)}
    del tensors[f"{UP}.{gone}"]
    checkpoint = opened(tmp_path, tensors, build({UP: row}, []))
    assert packed_names(checkpoint) == schemes(checkpoint).keys() == {UP}


def test_headers_are_checked_against_the_layout(tmp_path: Path) -> None:
    tensors = tensors_of(INT4, UP)
    packed_linear(opened(tmp_path, tensors, build({UP: INT4}, [])), UP, INT4).check()
    tensors[f"{UP}.weight_scale"] = tensors[f"{UP}.weight_scale"][:5].clone()
    linear = packed_linear(opened(tmp_path, tensors, build({UP: INT4}, [])), UP, INT4)
    with pytest.raises(InputError, match=rf"^{UP}\.weight_scale: is bfloat16 \[5, 2\] where"):
        linear.check()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_is_finite(dtype: torch.dtype) -> None:
    largest = torch.tensor([torch.finfo(dtype).max], dtype=torch.float64).to(dtype)
    assert is_finite(largest)
    assert not is_finite(torch.tensor([1.0, float("nan")]).to(dtype))
    assert is_finite(torch.tensor([1]))


def test_rows_at_a_time() -> None:
    assert [rows_at_a_time(columns, 100) for columns in (0, 1, 30, 1000)] == [100, 100, 3, 1]
