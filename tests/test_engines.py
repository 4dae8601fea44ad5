"""What other programs read: transformers with compressed-tensors loads the outputs and computes the same.

transformers 5.24 cannot load an asymmetric file packed (it expects the zero points unpacked); older ones such as 5.17
do. Our own loader reads them everywhere, and the test says which client is installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version

from compress_llm.calibration.protocols import protocol
from compress_llm.calibration.sources import read_source
from compress_llm.calibration.tokenizer import load_tokenizer
from compress_llm.compress_cli.runs.evaluate import evaluate
from compress_llm.compress_cli.runs.quantize import quantize
from compress_llm.compress_cli.runs.recipe import Recipe
from compress_llm.kernels.load import load
from compress_llm.kernels.packed_linear import PackedLinear

pytest.importorskip("compressed_tensors")
TEXT = str(Path(__file__).parent / "compress_cli/runs/calibration.txt")
IDS = torch.randint(3, 4000, (2, 16), generator=torch.Generator().manual_seed(0))
CLIENT = Version(transformers.__version__)
BROKEN_ASYMMETRIC = Version("5.18") <= CLIENT < Version("5.25")
WEIGHT_ONLY = {
    "group": Recipe(group_size=32),
    "channel": Recipe(group_size="channel"),
    "int8": Recipe(scheme="W8A16"),
    "gptq": Recipe(
        group_size=32,
        method="gptq",
        dataset=TEXT,
        num_samples=2,
        seq_len=16,
    ),
}


@pytest.fixture(scope="session")
def blocks(save_model: Callable[..., Path]) -> Path:
    """A model whose linears every block divides."""
    return save_model(
        "Llama", hidden_size=128, intermediate_size=256, head_dim=32, num_key_value_heads=4, tie_word_embeddings=False
    )


def ours_dense(model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Dense weights of our packed linears, all rows."""
    found: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear) and name.endswith("_proj"):
            found[name] = module.weight_rows(dtype=dtype)
    return found


def theirs_dense(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Dense weights after the first forward pass of the whole model, which is when transformers decodes them."""
    with torch.no_grad():
        model(IDS)
    return {name: module.get_parameter("weight") for name, module in model.named_modules() if name.endswith("_proj")}


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_weight_only_outputs_load_in_transformers_and_agree(name: str, tiny_llama: Path, tmp_path: Path) -> None:
    quantize(str(tiny_llama), tmp_path / "out", WEIGHT_ONLY[name])
    ours = load(tmp_path / "out", dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    mine, others = ours_dense(ours), theirs_dense(theirs)
    assert len(mine) == 14 and mine.keys() == others.keys()
    for key, weight in mine.items():
        assert torch.equal(weight, others[key]), key
    with torch.no_grad():
        a, b = ours(IDS).logits, theirs(IDS).logits
    assert float((a - b).norm() / b.norm()) < 1e-3


@pytest.mark.parametrize("name", ["NVFP4A16", "MXFP4A16", "MXFP8A16"])
def test_block_scaled_weights_decode_alike_and_give_the_same_logits(name: str, blocks: Path, tmp_path: Path) -> None:
    quantize(str(blocks), tmp_path / "out", Recipe(scheme=name))
    ours = load(tmp_path / "out", dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    mine, others = ours_dense(ours, torch.bfloat16), theirs_dense(theirs)
    assert len(mine) == 14 and mine.keys() == others.keys()
    for key, weight in mine.items():
        assert torch.equal(weight, others[key]), key
    with torch.no_grad():
        a, b = ours(IDS).logits, torch.nn.Module.float(theirs)(IDS).logits
    assert float((a - b).norm() / b.norm()) < 1e-3


INPUTS = ("W8A8", "W8A8_STATIC", "W4A8", "W4AFP8", "W8A8_BLOCK", "FP8", "FP8_DYNAMIC", "FP8_BLOCK")
INPUTS += ("NVFP4", "MXFP4", "MXFP8")


@pytest.mark.parametrize("name", INPUTS)
def test_quantised_inputs_agree_layer_by_layer(name: str, blocks: Path, tmp_path: Path) -> None:
    quantize(str(blocks), tmp_path / "out", Recipe(scheme=name, dataset=TEXT, num_samples=2, seq_len=16))
    ours = load(tmp_path / "out", dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    dense_weights, others = ours_dense(ours, torch.bfloat16), theirs_dense(theirs)
    for key, weight in dense_weights.items():
        assert torch.equal(weight, others[key]), key
    torch.nn.Module.float(theirs)
    generator = torch.Generator().manual_seed(1)
    for (layer, mine), (_, other) in zip(ours.named_modules(), theirs.named_modules(), strict=True):
        if layer.endswith("_proj"):
            x = torch.randn(1, 4, mine.in_features, generator=generator)
            with torch.no_grad():
                a, b = mine(x), other(x)
            dense = x @ dense_weights[layer].float().T
            assert float((a - b).norm() / b.norm()) < 1e-2, layer
            assert float((a - dense).norm() / dense.norm()) > 1e-3, "the inputs were not quantised"


@pytest.mark.parametrize(
    ("name", "dtype"), [("W8A8_STATIC", torch.float32), ("FP8_DYNAMIC", torch.float32), ("NVFP4", "auto")]
)
def test_quantised_inputs_give_the_same_perplexity(name: str, dtype: torch.dtype | str, tmp_path: Path) -> None:
    """Of a trained model, in float32. FP4 is decoded in bfloat16 there, which holds all of it under a power of two as
    the global scale, as the default rule has it."""
    quantize(None, tmp_path / "out", Recipe(scheme=name, dataset=TEXT, num_samples=2, seq_len=32))
    ours = evaluate(tmp_path / "out", dataset=TEXT, window=64, limit=2, device="cpu", dtype="float32")
    rules = protocol("plain", window=64)
    windows = rules.cut(read_source(TEXT), load_tokenizer(tmp_path / "out")).windows[:2]
    ids = torch.stack([window.ids for window in windows])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    with torch.no_grad():
        theirs(ids)
        scores = torch.nn.Module.float(theirs)(ids).logits[:, :-1].double().log_softmax(-1)
    wanted = -scores.gather(-1, ids[:, 1:, None]).mean()
    assert ours.nll == pytest.approx(float(wanted), rel=1e-5)


def test_asymmetric_files_load_here_and_in_the_clients_that_can(tiny_llama: Path, tmp_path: Path) -> None:
    quantize(str(tiny_llama), tmp_path / "out", Recipe(scheme="W4A16_ASYM", group_size=32))
    ours = ours_dense(load(tmp_path / "out"), torch.bfloat16)
    assert len(ours) == 14
    options = {}
    if BROKEN_ASYMMETRIC:
        with pytest.raises((RuntimeError, ValueError)):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", **options)
    for key, weight in theirs_dense(theirs).items():
        assert torch.equal(weight, ours[key]), key


def test_generate_works_on_the_packed_model(tiny_llama: Path, tmp_path: Path) -> None:
    quantize(str(tiny_llama), tmp_path / "out", Recipe(group_size=32))
    model = load(tmp_path / "out")
    produced = model.generate(IDS[:1], max_new_tokens=4, do_sample=False)
    assert produced.shape == (1, IDS.shape[1] + 4)


@pytest.mark.parametrize(
    ("scheme", "dtype", "bound"), [("W4A16", torch.float32, 1e-3), ("NVFP4A16", "auto", 1e-2), ("MXFP4", "auto", 1e-2)]
)
def test_rotated_inputs_agree_once_the_client_applies_what_config_json_says(
    scheme: str, dtype: torch.dtype | str, bound: float, tiny_llama: Path, tmp_path: Path
) -> None:
    """transformers passes `transform_config` over: its logits are wrong until compressed-tensors has applied it.

    FP4 it decodes in bfloat16 only.
    """
    from compressed_tensors.transform import TransformConfig, apply_transform_config

    recipe = Recipe(scheme=scheme, group_size="auto", method="hadamard", options={"hadamard": {"block": 32}})
    quantize(str(tiny_llama), tmp_path / "out", recipe)
    ours = load(tmp_path / "out", dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    with torch.no_grad():
        wanted, before = ours(IDS).logits, theirs(IDS).logits.float()
        config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["transform_config"]
        apply_transform_config(torch.nn.Module.float(theirs), TransformConfig.model_validate(config))
        after = theirs(IDS).logits
    assert float((before - wanted).norm() / wanted.norm()) > 0.1
    assert float((after - wanted).norm() / wanted.norm()) < bound
