"""The product in every implementation there is here, against float64 and against itself."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from compress_llm.formats.errors import InputError
from compress_llm.formats.float_grids import E4M3
from compress_llm.formats.grids import INT8
from compress_llm.formats.scheme import Activation
from compress_llm.kernels.cuda.arrivals import arrivals
from compress_llm.kernels.lowbit import configs, cuda_decode, cuda_gemm, product, triton_gemm, triton_narrow
from compress_llm.kernels.lowbit.cuda_decode import DecodeConfig
from compress_llm.kernels.lowbit.cuda_gemm import GemmConfig
from compress_llm.kernels.lowbit.narrow import values
from compress_llm.kernels.lowbit.ops import quantize_blocks
from compress_llm.kernels.registry import Pick

gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"
)


@pytest.mark.parametrize("narrow", [False, True])
def test_reference(sample, error, device, narrow) -> None:
    weight = sample(72, 160, 8 if narrow else 4, 0 if narrow else 32, device=device, narrow=narrow)
    x = torch.randn(2, 160, generator=torch.Generator().manual_seed(0)).half()
    token_scale, bias = None, torch.ones(72, dtype=torch.float16, device=device)
    if narrow:
        x, token_scale = (x * 30).to(torch.int8), torch.tensor([0.1, 0.2])
    exact = x.double() @ weight.exact.T * (1 if token_scale is None else token_scale.double()[:, None]) + 1
    scale = None if token_scale is None else token_scale.to(device)
    y = product.product(x.to(device), weight.arranged, bias, scale, torch.float16, "reference")
    assert error(y, exact) < 1e-3


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8", "fp8", "narrow"])
def test_reference_of_floating_point_weights(float_sample, error, device, kind) -> None:
    weight = float_sample(kind, 72, 192, device)
    x = torch.randn(2, 192, generator=torch.Generator().manual_seed(0)).half()
    token_scale = None
    if kind == "narrow":
        x, token_scale = (x * 30).to(torch.float8_e4m3fn), torch.tensor([0.1, 0.2])
    exact = x.double() @ weight.exact.T * (1 if token_scale is None else token_scale.double()[:, None])
    scale = None if token_scale is None else token_scale.to(device)
    assert error(product.product(x.to(device), weight.arranged, None, scale, torch.float16, "reference"), exact) < 1e-3


@pytest.mark.parametrize("floating", [False, True])
def test_reference_of_scaled_blocks(block_sample, error, device, floating) -> None:
    weight = block_sample(200, 256, floating, device)
    x, scale = quantize_blocks(torch.randn(3, 256, device=device).half(), 128, floating)
    bias = torch.ones(200, dtype=torch.float16, device=device)
    y = product.product(x, weight.arranged, bias, scale, torch.float16, "reference")
    assert error(y, values(x, scale, 8).cpu() @ weight.exact.T + 1) < 1e-3


def test_who_multiplies_4_bit_weights_as_8_bit_numbers(sample, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "picked", lambda *given: Pick("cuda", ""))
    weight, wide = sample(64, 128).arranged, sample(64, 128, 8, 128).arranged
    asked = [(weight, Activation(E4M3), 129), (weight, Activation(INT8), 4096), (weight, Activation(E4M3), 128)]
    asked += [
        (weight, None, 129),
        (weight, Activation(E4M3, "group", group_size=128), 129),
        (wide, Activation(INT8), 129),
    ]
    asked += [(sample(64, 128, 4, 64).arranged, Activation(INT8), 129)]
    asked += [(sample(64, 128, zero="int").arranged, Activation(INT8), 129)]
    seen = [product.as_multiplied(given, inputs, tokens, torch.float16) for given, inputs, tokens in asked]
    assert [(got.narrow, got.floating) for got in seen] == [(True, True), (True, False), *[(False, False)] * 6]
    monkeypatch.setattr(product, "picked", lambda *given: Pick("triton", ""))
    assert product.as_multiplied(weight, Activation(E4M3), 65, torch.float16) is weight


def test_each_pick_reaches_its_implementation(sample, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(product, "decode", lambda *given: seen.append(("decode", given[3])))
    monkeypatch.setattr(product, "gemm", lambda *given: seen.append(("gemm", given[3], given[6] is None)))
    monkeypatch.setattr(triton_gemm, "gemm", lambda *given: seen.append("triton"))
    monkeypatch.setattr(triton_narrow, "gemm", lambda *given: seen.append("triton int8"))
    monkeypatch.setattr(torch.cuda, "device", lambda place: nullcontext())
    configs = {1: DecodeConfig(), 64: GemmConfig()}
    monkeypatch.setattr(product, "configuration", lambda weight, tokens, place: configs[tokens])
    name = "cuda"
    monkeypatch.setattr(product, "picked", lambda *given: Pick(name, ""))
    weight, narrow = sample(64, 128).arranged, sample(64, 128, 8, 0, narrow=True).arranged
    for tokens in (1, 64):
        product.product(torch.zeros(tokens, 128).half(), weight, None, None, torch.float16)
    name = "triton"
    product.product(torch.zeros(1, 128).half(), weight, None, None, torch.float16)
    product.product(torch.zeros(1, 128, dtype=torch.int8), narrow, None, torch.ones(1), torch.float16)
    assert seen == [("decode", configs[1]), ("gemm", configs[64], True), "triton", "triton int8"]
    with pytest.raises(InputError, match="arranged for torch.float16"):
        product.product(torch.zeros(1, 128).bfloat16(), weight, None, None, torch.bfloat16)


def test_no_tokens_is_no_work(sample, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "dequantize", None)
    y = product.product(torch.zeros(0, 128).half(), sample(64, 128).arranged, None, None, torch.float16)
    assert y.shape == (0, 64)


@gpu
@pytest.mark.parametrize("group", [32, 64, 128, 0])
@pytest.mark.parametrize("zero", [None, "int", "float"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
def test_cuda_on_odd_shapes(sample, error, device, group, zero, dtype, bits) -> None:
    rows, columns = (1096, 1152) if group == 128 else (1096, 1088)
    weight = sample(rows, columns, bits, group, zero, dtype, device)
    dense = weight.exact.to(dtype).to(device)
    bias = torch.randn(rows, device=device, dtype=dtype)
    for tokens in (1, 3, 8, 16, 17, 64, 100, 300):
        x = torch.randn(tokens, columns, device=device, dtype=dtype)
        exact = x.double().cpu() @ weight.exact.T + bias.double().cpu()
        y, again = (product.product(x, weight.arranged, bias, None, dtype, "cuda") for _ in range(2))
        assert torch.equal(y, again)
        assert error(y, exact) < 1.5 * error(torch.nn.functional.linear(x, dense, bias), exact)


@gpu
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "mxfp8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cuda_on_floating_point_weights(float_sample, error, device, kind, dtype) -> None:
    weight = float_sample(kind, 1096, 1088, device)
    dense = weight.exact.to(dtype).to(device)
    bias = torch.randn(1096, device=device, dtype=dtype)
    for tokens in (1, 3, 8, 16, 17, 64, 100, 300):
        x = torch.randn(tokens, 1088, device=device, dtype=dtype)
        exact = x.double().cpu() @ weight.exact.T + bias.double().cpu()
        y, again = (product.product(x, weight.arranged, bias, None, dtype, "cuda") for _ in range(2))
        assert torch.equal(y, again)
        assert error(y, exact) < 1.5 * error(torch.nn.functional.linear(x, dense, bias), exact)


@gpu
@pytest.mark.parametrize("tokens", [1, 17, 100, 300])
@pytest.mark.parametrize("exact", [0, 1])
def test_cuda_fp8(float_sample, error, device, tokens, exact) -> None:
    weight = float_sample("narrow", 1096, 1088, device)
    x = (torch.randn(tokens, 1088, device=device) * 50).to(torch.float8_e4m3fn)
    scale, y = torch.rand(tokens, device=device) + 0.5, torch.empty(tokens, 1096, device=device).bfloat16()
    config = replace(configs.reasoned(weight.arranged, tokens, 132), exact=exact)
    product.run(x, weight.arranged, y, config, None, scale)
    wanted = x.double().cpu() @ weight.exact.T * scale.double().cpu()[:, None]
    assert error(y, wanted) < (1.5 if exact else 4) * error(wanted.bfloat16(), wanted)


@gpu
@pytest.mark.parametrize("exact", [0, 1])
@pytest.mark.parametrize(
    "shape", [{"tokens": 256, "pair": 2}, {"tokens": 64, "depth": 2, "splits": 2}, {"tokens": 32, "ways": 2}]
)
def test_cuda_fp8_in_parts(float_sample, error, device, shape, exact) -> None:
    weight = float_sample("narrow", 1096, 1088, device)
    x = (torch.randn(300, 1088, device=device) * 50).to(torch.float8_e4m3fn)
    scale, y = torch.rand(300, device=device) + 0.5, torch.empty(300, 1096, device=device).bfloat16()
    product.run(x, weight.arranged, y, GemmConfig(exact=exact, **shape), None, scale)
    wanted = x.double().cpu() @ weight.exact.T * scale.double().cpu()[:, None]
    assert error(y, wanted) < (1.5 if exact else 4) * error(wanted.bfloat16(), wanted)


@gpu
@pytest.mark.parametrize("tokens", [1, 17, 100, 300])
def test_cuda_int8(sample, error, device, tokens) -> None:
    weight = sample(1096, 1088, 8, 0, device=device, narrow=True)
    x = torch.randint(-128, 128, (tokens, 1088), dtype=torch.int8, device=device)
    scale = torch.rand(tokens, device=device) + 0.5
    y = product.product(x, weight.arranged, None, scale, torch.float16, "cuda")
    assert error(y, x.double().cpu() @ weight.exact.T * scale.double().cpu()[:, None]) < 3e-4


@pytest.fixture
def rounding(error):
    """The error of rounding `exact` to a dtype, but to bfloat16 where matrix units keep no more: those of E4M3."""
    return lambda exact, dtype, floating: error(exact.to(torch.bfloat16 if floating else dtype), exact)


@gpu
@pytest.mark.parametrize("floating", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1096, 4104])
def test_cuda_on_scaled_blocks(block_sample, error, rounding, device, floating, dtype, rows) -> None:
    weight = block_sample(rows, 1152, floating, device)
    bias = torch.randn(rows, device=device, dtype=dtype)
    for tokens in (1, 3, 17, 100, 300):
        x = torch.randn(tokens, 1152, device=device, dtype=dtype)
        x[:, ::7] *= 30
        x, scale = quantize_blocks(x, 128, floating)
        exact = values(x, scale, 8).cpu() @ weight.exact.T + bias.double().cpu()
        y, again = (product.product(x, weight.arranged, bias, scale, dtype, "cuda") for _ in range(2))
        assert torch.equal(y, again)
        assert error(y, exact) < 1.5 * rounding(exact, dtype, floating)


@gpu
@pytest.mark.parametrize("floating", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1096, 4104])
def test_cuda_on_4_bit_weights_as_8_bit_numbers(sample, error, rounding, device, floating, dtype, rows) -> None:
    weight = sample(rows, 1152, 4, 128, dtype=dtype, device=device)
    arranged = replace(weight.arranged, narrow=True, floating=floating)
    bias = torch.randn(rows, device=device, dtype=dtype)
    for tokens in (1, 17, 65, 100, 300):
        x, scale = quantize_blocks(torch.randn(tokens, 1152, device=device, dtype=dtype), 0, floating)
        exact = values(x, scale, 4).cpu() @ weight.exact.T + bias.double().cpu()
        y, again = (product.product(x, arranged, bias, scale, dtype, "cuda") for _ in range(2))
        assert torch.equal(y, again)
        assert error(y, exact) < 1.5 * rounding(exact, dtype, floating)


PARTS = [
    {"tokens": 256, "pair": 2},
    {"tokens": 64, "depth": 2, "splits": 2},
    {"tokens": 32, "ways": 2},
    {"tail": 3, "splits": 2},
]


@gpu
@pytest.mark.parametrize("floating", [False, True])
@pytest.mark.parametrize("shape", PARTS)
def test_cuda_on_scaled_blocks_in_parts(sample, block_sample, error, rounding, device, floating, shape) -> None:
    weight, narrow = block_sample(1096, 1152, floating, device), sample(1096, 1152, 4, 128, device=device)
    four = replace(narrow.arranged, narrow=True, floating=floating)
    x = torch.randn(299, 1152, device=device).half()
    for arranged, exact, bits in ((weight.arranged, weight.exact, 8), (four, narrow.exact, 4)):
        codes, scale = quantize_blocks(x, 128 if bits == 8 else 0, floating)
        y = torch.empty(299, 1096, device=device).half()
        product.run(codes, arranged, y, GemmConfig(**shape), None, scale)
        wanted = values(codes, scale, bits).cpu() @ exact.T
        assert error(y, wanted) < 1.5 * rounding(wanted, torch.float16, floating)


@gpu
@pytest.mark.parametrize("shape", [(16, 2, 1), (24, 3, 1), (32, 4, 1), (32, 2, 2), (8, 1, 4)])
def test_cuda_int8_of_few_tokens_in_parts(sample, error, device, shape) -> None:
    wide, depth, splits = shape
    weight = sample(1096, 1088, 8, 0, device=device, narrow=True)
    for tokens in (1, wide, 70):
        x = torch.randint(-128, 128, (tokens, 1088), dtype=torch.int8, device=device)
        scale, bias = torch.rand(tokens, device=device) + 0.5, torch.randn(1096, device=device).half()
        y = torch.empty(2, tokens, 1096, device=device).half()
        config = GemmConfig(tokens=wide, depth=depth, splits=splits)
        for out in y:
            product.run(x, weight.arranged, out, config, bias, scale)
        exact = x.double().cpu() @ weight.exact.T * scale.double().cpu()[:, None] + bias.double().cpu()
        assert error(y[0], exact) < 3e-4
        assert torch.equal(y[0], y[1])


@gpu
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("grid", [132, 8])  # few blocks: many rounds, of one block of inputs a warp
def test_decode_both_ways(sample, error, device, cluster, grid) -> None:
    weight = sample(1096, 1088, 4, 64, "int", device=device)
    config = DecodeConfig(pairs=2, depth=3, cluster=cluster, grid=grid)
    for tokens in (1, 7, 16):
        x, y = torch.randn(tokens, 1088, device=device).half(), torch.empty(tokens, 1096, device=device).half()
        cuda_decode.decode(x, weight.arranged, y, config, None, False)
        assert error(y, x.double().cpu() @ weight.exact.T) < 2e-3


@gpu
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("rows", [1095, 1000])  # the last pair of rows has one; the last tile has half of its rows
def test_decode_ends_where_the_result_does(float_sample, error, device, cluster, rows) -> None:
    weight = float_sample("nvfp4", rows, 1088, device)
    bias = torch.randn(rows, device=device).bfloat16()
    for tokens in range(1, 17):
        x = torch.randn(tokens, 1088, device=device).bfloat16()
        place = torch.full((tokens * rows + 8,), 7.0, device=device).bfloat16()
        y = place[: tokens * rows].view(tokens, rows)
        cuda_decode.decode(x, weight.arranged, y, DecodeConfig(pairs=2, cluster=cluster, grid=8), bias, False)
        exact = x.double().cpu() @ weight.exact.T + bias.double().cpu()
        assert error(y, exact) < 1.5 * error(exact.bfloat16(), exact)
        assert bool((place[tokens * rows :] == 7).all())


@gpu
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cluster", [1, 2])
def test_scales_of_one_token_go_into_sums_or_codes(float_sample, error, device, kind, dtype, cluster) -> None:
    weight = float_sample(kind, 1096, 1088, device)
    x = torch.randn(1, 1088, device=device, dtype=dtype)
    exact = x.double().cpu() @ weight.exact.T
    for spread, grid in ((0, 132), (0, 8), (1, 132), (1, 8)):
        y = torch.empty(1, 1096, device=device, dtype=dtype)
        config = DecodeConfig(8, 2, 2, 2, cluster, 1, grid, spread)
        cuda_decode.decode(x, weight.arranged, y, config, None, False)
        assert error(y, exact) < 1.5 * error(exact.to(dtype), exact)


@gpu
@pytest.mark.parametrize(
    "shape", [{"splits": 3}, {"pair": 2}, {"depth": 2, "splits": 2}, {"ways": 2}, {"tail": 3, "splits": 2}]
)
def test_gemm_in_parts(sample, error, device, shape) -> None:
    weight = sample(1096, 1088, 4, 64, "int", device=device)
    x, y = torch.randn(100, 1088, device=device).half(), torch.empty(100, 1096, device=device).half()
    config = GemmConfig(tokens=64, **shape)
    counters = arrivals(device, max(1, config.counters(weight.arranged, 100)))
    cuda_gemm.gemm(x, weight.arranged, y, config, None, None, counters, False)
    assert error(y, x.double().cpu() @ weight.exact.T) < 2e-3
    assert counters.count_nonzero() == 0
