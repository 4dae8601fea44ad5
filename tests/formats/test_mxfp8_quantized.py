"""`mxfp8-quantized` against compressed-tensors' own packer and decoder, bit for bit."""

from __future__ import annotations

import torch
from compressed_tensors.compressors import MXFP8QuantizationCompressor
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

from compress_llm.formats.float_grids import E8M0
from compress_llm.formats.mxfp8_quantized import Mxfp8Quantized
from compress_llm.formats.rounded import QParams, round_to_grid
from compress_llm.formats.scheme import SCHEMES

PACKING = Mxfp8Quantized()
SCHEME = SCHEMES["MXFP8A16"]
ORACLE = preset_name_to_scheme("MXFP8A16", ["Linear"])


def test_tensors_and_decoded_weights_are_those_of_compressed_tensors():
    weight = torch.randn(9, 96, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    weight[0, :32] = 0
    scale = E8M0.encode(weight.reshape(9, -1, 32).abs().amax(-1) / 300)
    rounded = round_to_grid(weight, SCHEME, QParams(scale, grid=E8M0))
    ours = PACKING.pack(rounded)
    theirs = MXFP8QuantizationCompressor.compress({"weight": weight, "weight_scale": E8M0.decode(scale)}, ORACLE)
    assert ours.keys() == theirs.keys() == {"weight", "weight_scale"}
    for suffix, tensor in ours.items():
        assert tensor.dtype == theirs[suffix].dtype
        assert torch.equal(tensor.view(torch.uint8), theirs[suffix].view(torch.uint8))


def test_any_tensors_decode_as_compressed_tensors_decodes_them(random_rounded):
    rounded = random_rounded(SCHEME, (24, 64), seed=3, binades=(-100, 100))
    decoded = MXFP8QuantizationCompressor.decompress(PACKING.pack(rounded), ORACLE)["weight"]
    assert torch.equal(rounded.dequantize(torch.bfloat16).view(torch.int16), decoded.view(torch.int16))
