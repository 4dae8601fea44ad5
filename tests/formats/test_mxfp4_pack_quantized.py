"""`mxfp4-pack-quantized` against compressed-tensors' own packer and decoder, bit for bit."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import MXFP4PackedCompressor
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

from compress_llm.formats.float_grids import E8M0
from compress_llm.formats.mxfp4_pack_quantized import Mxfp4PackQuantized
from compress_llm.formats.rounded import QParams, round_to_grid
from compress_llm.formats.scheme import SCHEMES

PACKING = Mxfp4PackQuantized()
SCHEME = SCHEMES["MXFP4A16"]
ORACLE = preset_name_to_scheme("MXFP4A16", ["Linear"])


@pytest.mark.parametrize("shape", [(16, 64), (7, 96), (1, 32)], ids=str)
def test_tensors_and_decoded_weights_are_those_of_compressed_tensors(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])).bfloat16().float()
    weight[0, :32], weight[-1, :32] = 0, 0
    weight[-1, 3] = 40
    scale = E8M0.encode(weight.reshape(shape[0], -1, 32).abs().amax(-1) / 5)
    rounded = round_to_grid(weight, SCHEME, QParams(scale, grid=E8M0))
    ours = PACKING.pack(rounded)
    theirs = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": E8M0.decode(scale)}, ORACLE)
    assert ours.keys() == theirs.keys() == {"weight_packed", "weight_scale"}
    assert torch.equal(ours["weight_scale"], theirs["weight_scale"])
    decoded = MXFP4PackedCompressor.decompress(ours, ORACLE)["weight"]
    assert torch.equal(PACKING.unpack(ours, SCHEME, rounded.shape).dequantize(torch.bfloat16), decoded)
    assert torch.equal(MXFP4PackedCompressor.decompress(theirs, ORACLE)["weight"], decoded)


def test_any_tensors_decode_as_compressed_tensors_decodes_them(random_rounded):
    rounded = random_rounded(SCHEME, (24, 64), seed=3, binades=(-100, 100))
    decoded = MXFP4PackedCompressor.decompress(PACKING.pack(rounded), ORACLE)["weight"]
    assert torch.equal(rounded.dequantize(torch.bfloat16).view(torch.int16), decoded.view(torch.int16))


def test_layout():
    assert PACKING.layout(SCHEME, 576, 1536, torch.bfloat16) == {
        "weight_packed": (torch.uint8, (576, 768)),
        "weight_scale": (torch.uint8, (576, 48)),
    }
