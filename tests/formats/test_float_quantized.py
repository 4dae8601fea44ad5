"""`float-quantized` against compressed-tensors' own packer and decoder, bit for bit."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import FloatQuantizationCompressor
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

from compress_llm.formats.float_quantized import FloatQuantized
from compress_llm.formats.scheme import SCHEMES

PACKING = FloatQuantized()
NAMES = ("FP8", "FP8_DYNAMIC", "FP8_BLOCK")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_any_tensors_decode_as_compressed_tensors_decodes_them(random_rounded, name, dtype):
    rounded = random_rounded(SCHEMES[name], (200, 256), dtype, binades=(-10, 4))
    tensors = PACKING.pack(rounded)
    decoded = FloatQuantizationCompressor.decompress(tensors, preset_name_to_scheme(name, ["Linear"]))["weight"]
    mine = PACKING.unpack(tensors, SCHEMES[name], rounded.shape).dequantize(dtype)
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(mine.view(integer), decoded.view(integer))


@pytest.mark.parametrize("name", NAMES)
def test_values_on_the_grid_are_packed_as_compressed_tensors_packs_them(random_rounded, name):
    rounded = random_rounded(SCHEMES[name], (130, 128), torch.float32, binades=(-3, 3))
    ours = PACKING.pack(rounded)
    given = {"weight": rounded.dequantize(), "weight_scale": ours["weight_scale"]}
    theirs = FloatQuantizationCompressor.compress(given, preset_name_to_scheme(name, ["Linear"]))
    assert theirs.keys() == {"weight", "weight_scale"}
    assert torch.equal(ours["weight"].float(), theirs["weight"].float())


def test_layouts():
    def shapes(name: str) -> dict[str, tuple[int, ...]]:
        return {suffix: shape for suffix, (_, shape) in PACKING.layout(SCHEMES[name], 200, 256, torch.float16).items()}

    assert shapes("FP8") == {"weight": (200, 256), "weight_scale": (1,), "input_scale": (1,)}
    assert shapes("FP8_DYNAMIC") == {"weight": (200, 256), "weight_scale": (200, 1)}
    assert shapes("FP8_BLOCK") == {"weight": (200, 256), "weight_scale": (2, 2)}
