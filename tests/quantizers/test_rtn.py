"""The baseline: the codes of compressed-tensors bit for bit, and the nearest codes under every other rule."""

from __future__ import annotations

import pytest
import torch

from compress_llm.formats.scheme import SCHEMES, Scheme
from compress_llm.quantizers.rtn import RTN

W4, W8 = SCHEMES["W4A16"], SCHEMES["W8A16"]


def published_codes(weight: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales by compressed-tensors' own min-max parameters and quantiser."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    args = quantization.QuantizationArgs(
        num_bits=scheme.grid.bits,
        type="int" if scheme.grid.name.startswith("int") else "float",
        symmetric=True,
        strategy=scheme.strategy,
        group_size=scheme.group_size,
    )
    grouped = weight.reshape(weight.shape[0], scheme.groups(weight.shape[1]), -1)
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    return quantize(weight, scale, zero, args, dtype=torch.int8), scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scheme", [W4.with_group(32), W4.with_group("channel"), W8], ids=str)
def test_symmetric_minmax_is_the_published_baseline(scheme: Scheme, dtype: torch.dtype) -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    rounded = RTN.function(weight.float(), scheme, None, dtype, RTN.options)
    codes, scale = published_codes(weight, scheme)
    assert torch.equal(rounded.params.scale, scale)
    assert torch.equal(rounded.codes, codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["FP8_DYNAMIC", "MXFP4A16", "MXFP8A16", "NVFP4A16"])
def test_minmax_of_floating_point_codes_is_the_published_baseline(name: str, dtype: torch.dtype) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    args = preset_name_to_scheme(name, ["Linear"]).weights
    whole = generate_gparam(weight.amin(), weight.amax()) if args.strategy == "tensor_group" else None
    if whole is not None and dtype == torch.float16:
        whole = (2688 / weight.abs().amax().float()).reshape(1)  # theirs is rounded to float16 and may overflow
    scheme = SCHEMES[name]
    groups = weight.reshape(64, scheme.groups(96), -1)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=whole)
    expected = quantize(weight, scale, zero, args, global_scale=whole).float()
    rounded = RTN.function(weight.float(), scheme, None, dtype, {"scale_rule": "minmax"})
    assert torch.equal(scheme.grid.decode(rounded.codes), expected)


def test_the_default_rule_is_the_schemes_own() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    for name in ("W4A16", "NVFP4A16", "MXFP4A16"):
        scheme = SCHEMES[name].with_group(16) if SCHEMES[name].groupable else SCHEMES[name]
        default = RTN.function(weight, scheme, None, torch.bfloat16, RTN.options)
        named = RTN.function(weight, scheme, None, torch.bfloat16, {"scale_rule": scheme.scale_rule})
        assert torch.equal(default.codes, named.codes)


@pytest.mark.parametrize("name", ["W4A16_ASYM", "W4A16"])
def test_other_rules_take_the_nearest_code(name: str) -> None:
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    scheme = SCHEMES[name].with_group(16)
    rounded = RTN.function(weight, scheme, None, torch.bfloat16, {"scale_rule": "mse"})
    scale, zero = rounded.params.spread(32)
    every = torch.arange(-8, 8).float()
    values = (every[:, None, None] - (0 if zero is None else zero)) * scale
    best = (values - weight).abs().amin(0)
    torch.testing.assert_close((rounded.dequantize() - weight).abs(), best, rtol=0, atol=1e-6)
