"""`int-quantized` against compressed-tensors' own packer and decoder, bit for bit."""

from dataclasses import replace

import pytest
import torch
from compressed_tensors.compressors import IntQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from compress_llm.formats.int_quantized import IntQuantized
from compress_llm.formats.rounded import QParams, Rounded, round_to_grid
from compress_llm.formats.scheme import SCHEMES

PACKING = IntQuantized()
ORACLE = QuantizationScheme(
    targets=["Linear"],
    weights=QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel"),
    input_activations=QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True),
    format="int-quantized",
)


def sample(rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, QParams]:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    weight[0], weight[:, 0], weight[-1] = 0, 0, 0.75
    weight[rows // 2] *= 1e-39 if dtype != torch.float16 else 1e-7
    weight = weight.to(dtype).float()
    limits = torch.finfo(dtype)
    scale = (weight.abs().amax(1, keepdim=True).double() / 127.5).clamp(min=limits.tiny * limits.eps)
    return weight, QParams(scale.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(16, 64), (7, 13), (1, 1), (9, 120)])
def test_tensors_and_decoded_weights_are_those_of_compressed_tensors(shape, dtype):
    weight, params = sample(*shape, dtype)
    rounded = round_to_grid(weight, SCHEMES["W8A8"], params)
    ours = PACKING.pack(rounded)
    theirs = IntQuantizationCompressor.compress({"weight": weight, "weight_scale": params.scale}, ORACLE)
    assert ours.keys() == theirs.keys() == {"weight", "weight_scale"}
    for suffix, tensor in ours.items():
        assert tensor.dtype == theirs[suffix].dtype
        assert torch.equal(tensor, theirs[suffix])
    decoded = IntQuantizationCompressor.decompress(ours, ORACLE)["weight"]
    mine = PACKING.unpack(ours, SCHEMES["W8A8"], rounded.shape).dequantize(dtype)
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(mine.view(integer), decoded.view(integer))


def test_static_schemes_store_the_scale_of_their_inputs_in_the_dtype_of_the_weights_scales():
    weight, params = sample(4, 6, torch.bfloat16)
    rounded = round_to_grid(weight, SCHEMES["W8A8_STATIC"], params)
    tensors = PACKING.pack(replace(rounded, input_scale=torch.tensor([0.125], dtype=torch.bfloat16)))
    assert tensors["input_scale"].tolist() == [0.125]
    with pytest.raises(ValueError, match="input_scale is float32"):
        PACKING.pack(replace(rounded, input_scale=torch.tensor([0.125])))


def test_a_scheme_with_zero_points_has_no_place_here():
    scheme = replace(SCHEMES["W8A8"], symmetric=False)
    rounded = Rounded(scheme, torch.zeros(2, 2, dtype=torch.int8), QParams(torch.ones(2, 1), torch.ones(2, 1).char()))
    with pytest.raises(ValueError, match="zero points"):
        PACKING.pack(rounded)
