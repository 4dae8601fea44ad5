"""`nvfp4-pack-quantized` against compressed-tensors' own packer and decoder, bit for bit."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import NVFP4PackedCompressor
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

from compress_llm.formats.errors import InputError
from compress_llm.formats.float_grids import E4M3
from compress_llm.formats.nvfp4_pack_quantized import Nvfp4PackQuantized
from compress_llm.formats.rounded import QParams, round_to_grid
from compress_llm.formats.scheme import SCHEMES

PACKING = Nvfp4PackQuantized()
SCHEME = SCHEMES["NVFP4A16"]
ORACLE = preset_name_to_scheme("NVFP4A16", ["Linear"])


def sample(shape: tuple[int, int]) -> torch.Tensor:
    """bfloat16 values with a block of zeros, a block of one outlier, and one far below the rest."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])).bfloat16().float()
    weight[0, :16] = 0
    weight[-1, :16] = 0
    weight[-1, 3] = 40
    weight[1 % shape[0], -16:] *= 2.0**-9
    return weight


@pytest.mark.parametrize("shape", [(16, 64), (7, 48), (1, 16)], ids=str)
def test_tensors_and_decoded_weights_are_those_of_compressed_tensors(shape):
    weight = sample(shape)
    whole = (2688 / weight.abs().max()).bfloat16().float().reshape(1)
    scale = E4M3.encode(weight.reshape(shape[0], -1, 16).abs().amax(-1) / 6 * whole).clamp(min=1)
    rounded = round_to_grid(weight, SCHEME, QParams(scale, grid=E4M3, global_scale=whole))
    ours = PACKING.pack(rounded)
    local = E4M3.decode(scale)
    given = {"weight": weight, "weight_scale": local, "weight_global_scale": whole}
    theirs = NVFP4PackedCompressor.compress(given, ORACLE)
    assert ours.keys() == theirs.keys() == {"weight_packed", "weight_scale", "weight_global_scale"}
    for suffix, tensor in ours.items():
        assert tensor.dtype == theirs[suffix].dtype, suffix
    assert torch.equal(ours["weight_scale"].float(), theirs["weight_scale"].float())
    decoded = NVFP4PackedCompressor.decompress(ours, ORACLE)["weight"]
    mine = PACKING.unpack(ours, SCHEME, rounded.shape).dequantize(torch.bfloat16)
    assert torch.equal(mine, decoded)
    assert torch.equal(NVFP4PackedCompressor.decompress(theirs, ORACLE)["weight"], decoded)


def test_any_tensors_decode_as_compressed_tensors_decodes_them(random_rounded):
    rounded = random_rounded(SCHEME, (24, 64), seed=3)
    decoded = NVFP4PackedCompressor.decompress(PACKING.pack(rounded), ORACLE)["weight"]
    mine = rounded.dequantize(torch.bfloat16)
    assert torch.equal(mine.view(torch.int16), decoded.view(torch.int16))


def test_layout_with_quantised_inputs():
    assert PACKING.layout(SCHEMES["NVFP4"], 576, 1536, torch.bfloat16) == {
        "weight_packed": (torch.uint8, (576, 768)),
        "weight_scale": (torch.float8_e4m3fn, (576, 96)),
        "weight_global_scale": (torch.float32, (1,)),
        "input_global_scale": (torch.float32, (1,)),
    }


def test_rows_that_blocks_do_not_divide_are_refused():
    with pytest.raises(InputError, match="group size 16: does not divide the 40 inputs"):
        PACKING.layout(SCHEME, 8, 40, torch.bfloat16)
