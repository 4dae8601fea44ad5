"""Calibrated scales of inputs: their dtype, their size, and the room that they leave."""

from __future__ import annotations

import torch

from compress_llm.formats.scheme import SCHEMES
from compress_llm.kernels.activations import quantize_activation
from compress_llm.quantizers.input_scales import input_scale

ABS_MAX = torch.tensor([0.5, 3.0, 1.0])


def test_static_inputs_have_one_unit_of_their_grid() -> None:
    for name, reach in (("FP8", 448.0), ("W8A8_STATIC", 127.5)):
        activation = SCHEMES[name].activation
        assert activation is not None
        found = input_scale(activation, ABS_MAX, torch.bfloat16)
        assert found is not None and found.dtype == torch.bfloat16
        assert torch.equal(found, torch.tensor([3.0 / reach]).bfloat16())


def test_dynamic_inputs_need_none() -> None:
    for name in ("FP8_DYNAMIC", "MXFP4", "W8A8_BLOCK"):
        activation = SCHEMES[name].activation
        assert activation is not None and input_scale(activation, ABS_MAX, torch.float32) is None


def test_a_global_scale_is_a_power_of_two_with_room_for_twice_what_was_seen() -> None:
    activation = SCHEMES["NVFP4"].activation
    assert activation is not None
    for peak in (1e-6, 0.3, 3.0, 1e5):
        found = input_scale(activation, torch.tensor([peak]), torch.bfloat16)
        assert found is not None and found.dtype == torch.float32
        assert float(torch.frexp(found).mantissa) == 0.5
        assert 448 * 6 / 4 < float(found) * peak <= 448 * 6 / 2
        x = torch.full((1, 16), 2 * peak)
        assert torch.allclose(quantize_activation(x, activation, found), x, rtol=0.05)
    silent = input_scale(activation, torch.zeros(3), torch.bfloat16)
    assert silent is not None and bool(silent.isfinite())
