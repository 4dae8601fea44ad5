"""The stream against the whole model: same states, same statistics, in one block at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress_llm.calibration.lanes import Stage
from compress_llm.calibration.statistics import Stats
from compress_llm.calibration.stream import Stream
from compress_llm.calibration.windows import Windows
from compress_llm.formats.architectures import architecture
from compress_llm.formats.checkpoint import Checkpoint
from compress_llm.formats.errors import InputError
from compress_llm.kernels.hadamard import rotate

IDS = torch.randint(3, 4000, (5, 24), generator=torch.Generator().manual_seed(3))
MOE = {"num_local_experts": 3, "num_experts_per_tok": 2}
MODELS = {
    "Llama": {},
    "Qwen2": {},
    "Gemma2": {},
    "Gemma3Text": {"sliding_window": 8, "num_hidden_layers": 6},
    "Phi3": {},
    "Mixtral": MOE,
}


def open_stream(directory: Path, keep: Tensor | None = None, batch_size: int = 2) -> tuple[Stream, Checkpoint]:
    checkpoint = Checkpoint.open(directory)
    facts = architecture(checkpoint.config, {name: info.shape for name, info in checkpoint.tensors.items()})
    windows = Windows(IDS, keep, IDS.numel())
    stream = Stream(checkpoint, facts, windows, batch_size=batch_size)
    stream.start()
    return stream, checkpoint


def block_weights(checkpoint: Checkpoint, number: int) -> dict[str, Tensor]:
    prefix = f"model.layers.{number}."
    return {name: checkpoint.read(name) for name in checkpoint.tensors if name.startswith(prefix)}


def states(stream: Stream) -> Tensor:
    return torch.cat([batch.hidden for batch in stream._batches])


@pytest.mark.parametrize("kind", MODELS)
def test_states_after_every_block_are_those_of_the_whole_model(kind: str, save_model: Callable[..., Path]) -> None:
    from transformers import AutoModelForCausalLM

    directory = save_model(kind, dtype=torch.float32, **MODELS[kind])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    collected: list[Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _m, _a, out: collected.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        model(IDS)
    stream, checkpoint = open_stream(directory)
    for number, expected in enumerate(collected):
        block = stream.block(number, block_weights(checkpoint, number))
        stream.advance(block)
        stream.release(block)
        torch.testing.assert_close(states(stream), expected, rtol=1e-4, atol=1e-4)


def test_stages_group_the_linears_that_share_an_input(tiny_llama: Path) -> None:
    stream, checkpoint = open_stream(tiny_llama)
    block = stream.block(1, block_weights(checkpoint, 1))
    short = [[name.rpartition(".")[2] for name in stage] for stage in block.stages]
    assert short == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]


def test_padding_stays_out_of_the_statistics_and_of_the_attention(tiny_llama: Path) -> None:
    keep = torch.ones_like(IDS, dtype=torch.bool)
    keep[:, 10:] = False
    fields = frozenset({"second_moment"})
    stream, checkpoint = open_stream(tiny_llama, keep)
    block = stream.block(0, block_weights(checkpoint, 0))
    padded = stream.collect(block, fields)
    short = Windows(IDS[:, :10], None, IDS[:, :10].numel())
    other = Stream(checkpoint, stream._facts, short, batch_size=2)
    other.start()
    reference = other.collect(other.block(0, block_weights(checkpoint, 0)), fields)
    for stage, stats in padded.items():
        assert stats.tokens == 50
        torch.testing.assert_close(stats.second_moment, reference[stage].second_moment, rtol=1e-4, atol=1e-4)


def test_staged_states_equal_a_plain_pass_with_the_new_weights(tiny_llama: Path) -> None:
    def halve(stage: Stage, _stats: Stats, _inputs: list[Tensor]) -> dict[str, Tensor]:
        return {name: block.linears[name].weight.detach() * 0.5 for name in stage}

    stream, checkpoint = open_stream(tiny_llama)
    block = stream.block(0, block_weights(checkpoint, 0))
    stream.advance_staged(block, halve, frozenset({"abs_max"}))
    plain, _ = open_stream(tiny_llama)
    weights = block_weights(checkpoint, 0)
    halved = {name: w * 0.5 if name.endswith("proj.weight") else w for name, w in weights.items()}
    again = plain.block(0, halved)
    plain.advance(again)
    assert torch.equal(states(stream), states(plain))


def test_a_released_block_holds_no_memory(tiny_llama: Path) -> None:
    stream, checkpoint = open_stream(tiny_llama)
    block = stream.block(0, block_weights(checkpoint, 0))
    stream.release(block)
    assert all(parameter.is_meta for parameter in block.module.parameters())


def test_experts_are_seen_token_by_token(save_model: Callable[..., Path]) -> None:
    stream, checkpoint = open_stream(save_model("Mixtral", **MOE))
    block = stream.block(0, block_weights(checkpoint, 0))
    stats = stream.collect(block, frozenset({"abs_max"}))
    experts = [found.tokens for (name,), found in stats.items() if name.endswith(".w1")]
    assert sum(experts) == IDS.numel() * MOE["num_experts_per_tok"]


def test_a_block_that_lacks_a_weight_is_refused(tiny_llama: Path) -> None:
    stream, checkpoint = open_stream(tiny_llama)
    weights = block_weights(checkpoint, 1)
    del weights["model.layers.1.post_attention_layernorm.weight"]
    with pytest.raises(InputError, match="layers.1.post_attention_layernorm.weight: is missing from the checkpoint"):
        stream.block(1, weights)


def test_ids_beyond_the_vocabulary_are_refused(tiny_llama: Path) -> None:
    checkpoint = Checkpoint.open(tiny_llama)
    facts = architecture(checkpoint.config, {name: info.shape for name, info in checkpoint.tensors.items()})
    size = checkpoint.config["vocab_size"]
    with pytest.raises(InputError, match=f"it gives the id {size}, and the model's vocabulary has {size:,} t"):
        Stream(checkpoint, facts, Windows(torch.tensor([[0, size]]), None, 2))


def test_tables_that_old_checkpoints_store_are_left_aside(tiny_llama: Path) -> None:
    stream, checkpoint = open_stream(tiny_llama)
    weights = block_weights(checkpoint, 0)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.full((8,), torch.nan)
    stream.advance(stream.block(0, weights))
    assert bool(states(stream).isfinite().all())


@pytest.mark.parametrize("kind", ["Llama", "Mixtral"])
def test_statistics_of_rotated_inputs_are_rotated_statistics(kind: str, save_model: Callable[..., Path]) -> None:
    """RᵀHR for the linears that are rotated, H for the others of the same stage, and states that know of neither."""
    changes = MOE if kind == "Mixtral" else {}
    directory = save_model(kind, **changes)
    fields = frozenset({"second_moment", "abs_max"})
    seen: dict[str, Stats] = {}

    def look(stage: Stage, stats: Stats, _inputs: list[Tensor]) -> dict[str, Tensor]:
        seen.update(dict.fromkeys(stage, stats))
        return {}

    stream, checkpoint = open_stream(directory)
    block = stream.block(0, block_weights(checkpoint, 0))
    plain = {name: stats for stage, stats in stream.collect(block, fields).items() for name in stage}
    turns = {name: 16 for name in block.linears if not name.endswith("k_proj")}
    stream.advance_staged(block, look, fields, turns)
    assert seen.keys() == block.linears.keys()
    for name, stats in seen.items():
        found, known = stats.second_moment, plain[name].second_moment
        assert found is not None and known is not None and stats.abs_max is not None
        expected = rotate(rotate(known.double(), 16).T, 16).T if name in turns else known.double()
        scale = float(expected.abs().max())
        torch.testing.assert_close(found.double() / scale, expected / scale, rtol=1e-4, atol=1e-5)
        assert torch.equal(stats.abs_max, plain[name].abs_max) == (name not in turns)
    other, _ = open_stream(directory)
    again = other.block(0, block_weights(checkpoint, 0))
    other.advance(again)
    assert torch.equal(states(stream), states(other))


def test_a_look_at_a_block_moves_no_state(tiny_llama: Path) -> None:
    stream, checkpoint = open_stream(tiny_llama)
    block = stream.block(0, block_weights(checkpoint, 0))
    before = states(stream).clone()
    seen = torch.cat(stream.look(block))
    assert torch.equal(states(stream), before)
    stream.advance(block)
    assert torch.equal(states(stream), seen)
