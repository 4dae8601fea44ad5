"""What linears that engines fuse share, and the room that calibrated scales leave on text they have not seen."""

from __future__ import annotations

from pathlib import Path

import torch

from compress_llm.calibration import embedded
from compress_llm.calibration.tokenizer import load_tokenizer
from compress_llm.compress_cli.runs.plan import make_plan
from compress_llm.compress_cli.runs.quantize import quantize
from compress_llm.compress_cli.runs.recipe import Recipe
from compress_llm.compress_cli.runs.rounding import peaks
from compress_llm.formats.checkpoint import Checkpoint
from compress_llm.kernels.load import load
from compress_llm.kernels.packed_linear import PackedLinear


def test_peaks_are_taken_over_what_is_fused(tiny_llama: Path) -> None:
    checkpoint = Checkpoint.open(tiny_llama)
    plan = make_plan(Recipe(scheme="NVFP4A16", ignore=("*.v_proj", "*.q_proj", "*.k_proj")), checkpoint)
    block = plan.units[1]
    found = peaks(plan.architecture, block.layers, lambda layer: checkpoint.read(layer.source))
    stem = "model.layers.0"
    own = {
        name: checkpoint.read(f"{stem}.{name}_proj.weight").abs().max() for name in ("mlp.gate", "mlp.up", "mlp.down")
    }
    assert found.keys() == {f"{stem}.{name}_proj" for name in (*own, "self_attn.o")}
    both = torch.maximum(own["mlp.gate"], own["mlp.up"])
    assert found[f"{stem}.mlp.gate_proj"] == found[f"{stem}.mlp.up_proj"] == both
    assert found[f"{stem}.mlp.down_proj"] == own["mlp.down"]


def test_schemes_without_a_number_for_the_tensor_need_no_peaks(tiny_llama: Path) -> None:
    checkpoint = Checkpoint.open(tiny_llama)
    plan = make_plan(Recipe(scheme="MXFP4A16"), checkpoint)
    assert peaks(plan.architecture, plan.layers, lambda layer: checkpoint.read(layer.source)) == {}


def test_block_scales_of_inputs_stay_below_their_greatest_on_text_that_was_not_calibrated_on(tmp_path: Path) -> None:
    quantize(None, tmp_path / "out", Recipe(scheme="NVFP4", num_samples=8, seq_len=64))
    model = load(tmp_path / "out")
    greatest: list[float] = []

    def look(module: PackedLinear, args: tuple[torch.Tensor]) -> None:
        greatest.append(float(args[0].abs().max() / 6 * module.tensors["input_global_scale"]))

    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.register_forward_pre_hook(look)
    text = embedded.text_path("test").read_text(encoding="utf-8")[:4000]
    model(torch.tensor([load_tokenizer(embedded.model_path()).encode(text)]))
    assert len(greatest) == 42
    assert max(greatest) <= 448
