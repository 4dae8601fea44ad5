"""What lies between the last hidden state and the logits is found, or refused, never guessed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, Gemma2Config, GraniteConfig, LlamaConfig
from transformers import AutoModelForCausalLM as Auto

from compress_llm.calibration.heads import head_of
from compress_llm.formats.errors import InputError
from compress_llm.formats.packings import packing
from compress_llm.formats.rounded import QParams, Rounded, round_to_grid
from compress_llm.formats.scheme import Scheme, scheme
from compress_llm.kernels.packed_linear import PackedLinear

SIZES = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
PROMPT = torch.arange(40)


def test_scale_and_cap_are_read_off_the_config() -> None:
    gemma = head_of(Auto.from_config(Gemma2Config(**SIZES, **HEADS, final_logit_softcapping=0.1)), PROMPT)
    granite = head_of(Auto.from_config(GraniteConfig(**SIZES, **HEADS, logits_scaling=4.0)), PROMPT)
    llama = head_of(Auto.from_config(LlamaConfig(**SIZES, **HEADS)), PROMPT)
    assert (gemma.scale, gemma.cap) == (1.0, 0.1)
    assert (granite.scale, granite.cap) == (0.25, None)
    assert (llama.scale, llama.cap, llama.vocabulary) == (1.0, None, 50)


@pytest.mark.parametrize(
    ("stored", "made"),
    [("float64", "float64"), ("float32", "float32"), ("bfloat16", "float32"), ("float16", "float32")],
)
def test_logits_are_float32_or_better(stored: str, made: str) -> None:
    model = Auto.from_config(LlamaConfig(**SIZES, **HEADS), dtype=getattr(torch, stored))
    assert head_of(model, PROMPT).dtype == getattr(torch, made)


def test_an_unknown_head_is_refused_by_name() -> None:
    model = Auto.from_config(LlamaConfig(**SIZES, **HEADS))
    plain = model.forward

    def squared(*args: object, **kwargs: object) -> SimpleNamespace:
        return SimpleNamespace(logits=plain(*args, **kwargs).logits.add(0.5).square())

    model.forward = squared
    with pytest.raises(InputError, match="LlamaForCausalLM"):
        head_of(model, PROMPT)


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(InputError, match="LlamaModel: it has no language-model head"):
        head_of(AutoModel.from_config(LlamaConfig(**SIZES, **HEADS)), PROMPT)


@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM", "W8A16", "W8A8"])
def test_a_packed_head_is_decoded_in_slices_and_quantises_its_input(name: str) -> None:
    model = Auto.from_config(LlamaConfig(**SIZES, **HEADS))
    chosen = scheme(name).with_group("channel")
    tensors = packing(chosen).pack(rounded(model.lm_head.weight.detach(), chosen))
    model.lm_head = PackedLinear(chosen, (50, 16), tensors)
    head = head_of(model, PROMPT)
    hidden = torch.randn(3, 16)
    parts = [head.logits(head.inputs(hidden), head.rows(start, min(start + 17, 50))) for start in (0, 17, 34)]
    torch.testing.assert_close(torch.cat(parts, 1), model.lm_head(hidden))


def rounded(weight: Tensor, chosen: Scheme) -> Rounded:
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    steps = 2**chosen.grid.bits - 1
    scale = (torch.maximum(high, -low) * 2 if chosen.symmetric else high - low) / steps
    zero = None if chosen.symmetric else (chosen.grid.lowest - low / scale).round().to(torch.int8)
    return round_to_grid(weight, chosen, QParams(scale, zero))


def test_a_model_that_hides_its_states_is_refused() -> None:
    model = Auto.from_config(LlamaConfig(**SIZES, **HEADS))
    model.base_model_prefix = ""
    with pytest.raises(InputError, match="gives no hidden states"):
        head_of(model, PROMPT)
