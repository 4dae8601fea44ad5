"""transformers with compressed-tensors reads what the packings and `quantization_config` write."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from compress_llm.formats.packings import packing
from compress_llm.formats.quantization_config import build
from compress_llm.formats.rounded import Rounded
from compress_llm.formats.scheme import SCHEMES, Scheme
from compress_llm.quantizers.input_scales import input_scale
from compress_llm.quantizers.rtn import RTN

W4 = SCHEMES["W4A16"].with_group(4)
KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KEPT = "model.layers.1.mlp.down_proj"
NARROW = {name: SCHEMES[name].with_group(4) for name in ("W4A16", "W4A8", "W4AFP8")}
STOCK = {name: row for name, row in {**SCHEMES, **NARROW}.items() if not row.packing.startswith("compress-")}
ONE = {name: dict.fromkeys(KINDS, scheme) for name, scheme in STOCK.items() if scheme.symmetric}
MIXED = {**dict.fromkeys(KINDS[:3], W4), "o_proj": SCHEMES["W8A16"], **dict.fromkeys(KINDS[4:], SCHEMES["W8A8"])}


def small_llama(blocks: bool) -> LlamaForCausalLM:
    """Random, with sizes that eight does not divide, or that every block does."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 36, "intermediate_size": 52, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 12}
    if blocks:
        sizes |= {"hidden_size": 128, "intermediate_size": 256}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=False)).to(torch.bfloat16).eval()


def round_linear(weight: torch.Tensor, scheme: Scheme) -> Rounded:
    rounded = RTN.function(weight.float(), scheme, None, weight.dtype, {"scale_rule": "minmax"})
    if scheme.activation is None or scheme.activation.calibrated is None:
        return rounded
    return replace(rounded, input_scale=input_scale(scheme.activation, torch.tensor([2.5]), weight.dtype))


def write(directory: Path, chosen: dict[str, Scheme]) -> tuple[LlamaForCausalLM, dict[str, Rounded]]:
    """Save a small model with every linear under its scheme but for one; the dense model and what was rounded."""
    model = small_llama(any(not scheme.groupable and scheme.group_size for scheme in chosen.values()))
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    names = [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]
    names.remove(KEPT)
    rounded = {name: round_linear(tensors.pop(f"{name}.weight"), chosen[name.rsplit(".", 1)[1]]) for name in names}
    schemes = {name: weight.scheme for name, weight in rounded.items()}
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    config["quantization_config"] = build(schemes, ["lm_head", KEPT])
    (directory / "config.json").write_text(json.dumps(config))
    save_file({**tensors, **packed(rounded)}, directory / "model.safetensors", metadata={"format": "pt"})
    return model, rounded


def packed(rounded: dict[str, Rounded]) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{suffix}": tensor
        for name, weight in rounded.items()
        for suffix, tensor in packing(weight.scheme).pack(weight).items()
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("chosen", [*ONE.values(), MIXED], ids=[*ONE, "mixed"])
def test_loads_with_the_same_tensors_weights_and_logits(chosen, dtype, tmp_path):
    model, rounded = write(tmp_path, chosen)
    coded = any(weight.scheme.scale_grid is not None for weight in rounded.values())
    stored = torch.bfloat16 if coded else dtype  # the client decodes scales that are codes to nothing else
    both: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=stored, output_loading_info=True)
    loaded, info = both
    assert not any(info.values()), info
    state = loaded.state_dict()
    for name, tensor in packed(rounded).items():
        assert torch.equal(state[name].to(tensor.dtype), tensor), name

    model = model.to(dtype)
    ids = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        loaded(ids)  # decodes the weights
        theirs = loaded.to(dtype)(ids).logits
        for name, weight in rounded.items():
            dense = weight.dequantize(stored).to(dtype)
            assert torch.equal(loaded.get_submodule(name).weight, dense), name
            model.get_submodule(name).weight.copy_(dense)
        ours = model(ids).logits
    error = float((theirs - ours).float().norm() / ours.float().norm())
    noise = 1e-2 if dtype != torch.float32 else 1e-4 if coded else 1e-5
    if all(weight.scheme.activation is None for weight in rounded.values()):
        assert error < noise
    else:
        assert 1e-4 < error < 0.2, "only the loaded model quantises its inputs"
