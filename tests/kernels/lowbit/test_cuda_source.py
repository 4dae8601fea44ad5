"""What the launchers ask for: macros, shapes, shared memory; and that every source compiles where NVRTC is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compress_llm.kernels.cuda import driver, nvrtc
from compress_llm.kernels.lowbit import cuda_decode, cuda_gemm, cuda_quantize, cuda_source
from compress_llm.kernels.lowbit.configs import reasoned
from compress_llm.kernels.lowbit.cuda_decode import DecodeConfig
from compress_llm.kernels.lowbit.cuda_gemm import GemmConfig
from compress_llm.kernels.lowbit.cuda_quantize import QuantizeConfig
from compress_llm.kernels.lowbit.cuda_quantize import reasoned as reasoned_tokens

VARIANTS = [
    (4, 128, None, torch.bfloat16, False),
    (4, 32, "int", torch.float16, False),
    (4, 0, "float", torch.bfloat16, False),
    (8, 64, "int", torch.bfloat16, False),
    (8, 0, None, torch.float16, True),
]
QUANTIZED = [
    (torch.bfloat16, False, None),
    (torch.float16, True, None),
    (torch.float32, False, None),
    (torch.float32, True, torch.float16),
    (torch.bfloat16, True, torch.float32),
    (torch.float16, False, torch.bfloat16),
]


@pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is not installed")
@pytest.mark.parametrize(("bits", "group", "zero", "dtype", "narrow"), VARIANTS)
def test_sources_compile(sample, bits, group, zero, dtype, narrow, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(nvrtc.CACHE_VARIABLE, str(tmp_path))
    weight = sample(128, 256, bits, group, zero, dtype, narrow=narrow).arranged
    chosen = [(tokens, reasoned(weight, tokens, 132)) for tokens in (3, 16, 64, 300)]
    if narrow:  # parts that send each other their sums
        chosen += [(16, GemmConfig(tokens=24, depth=3)), (16, GemmConfig(tokens=32, depth=4))]
    for tokens, config in chosen:
        if isinstance(config, DecodeConfig):
            name, macros = "decode", cuda_decode.macros(weight, dtype, tokens, config)
        else:
            name, macros = "gemm", cuda_gemm.macros(weight, dtype, config)
        assert cuda_source.cubin(name, macros, "sm_90a")[:4] == b"\x7fELF"


@pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is not installed")
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "mxfp8", "fp8", "narrow"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_floating_point_sources_compile(float_sample, kind, dtype, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(nvrtc.CACHE_VARIABLE, str(tmp_path))
    weight = float_sample(kind, 128, 256).arranged
    for tokens in (1, 3, 300):
        config = reasoned(weight, tokens, 132)
        if isinstance(config, DecodeConfig):
            name, macros = "decode", cuda_decode.macros(weight, dtype, tokens, config)
        else:
            name, macros = "gemm", cuda_gemm.macros(weight, dtype, config)
        assert cuda_source.cubin(name, macros, "sm_90a")[:4] == b"\x7fELF"


@pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is not installed")
@pytest.mark.parametrize(("dtype", "floating", "given"), QUANTIZED)
def test_the_quantisation_of_tokens_compiles(dtype, floating, given, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(nvrtc.CACHE_VARIABLE, str(tmp_path))
    for config in (reasoned_tokens(1, 1792, 132), QuantizeConfig(96, 3, 2, 0), reasoned_tokens(4096, 512, 132)):
        macros = cuda_quantize.macros(dtype, given, floating, config)
        assert cuda_source.cubin("quantize", macros, "sm_90a")[:4] == b"\x7fELF"


@pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is not installed")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("floating", [False, True])
def test_sources_of_scaled_blocks_compile(sample, block_sample, bits, floating, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(nvrtc.CACHE_VARIABLE, str(tmp_path))
    if bits == 8:
        weight = block_sample(128, 256, floating).arranged
    else:
        weight = replace(sample(128, 256, 4, 128).arranged, narrow=True, floating=floating)
    for tokens in (3, 300):
        macros = cuda_gemm.macros(weight, torch.float16, reasoned(weight, tokens, 132))
        assert cuda_source.cubin("gemm", macros, "sm_90a")[:4] == b"\x7fELF"


def test_macros_say_what_a_weight_is(sample) -> None:
    seen = [
        cuda_source.variant(sample(128, 256, bits, group, zero, dtype, narrow=narrow).arranged, dtype)
        for bits, group, zero, dtype, narrow in VARIANTS
    ]
    assert [tuple(row.values()) for row in seen] == [
        (0, 0, 0, 4, 1, 1, 0),
        (0, 0, 1, 4, 1, 4, 1),
        (0, 0, 0, 4, 0, 1, 2),
        (0, 0, 0, 8, 1, 2, 2),
        (1, 0, 1, 8, 0, 1, 0),
    ]


def test_which_sums_leave_the_matrix_units(sample, float_sample, block_sample) -> None:
    narrow, wide = float_sample("narrow", 128, 256).arranged, float_sample("nvfp4", 128, 256).arranged
    integer = sample(128, 256, 8, 0, narrow=True).arranged
    for weight, config, exact in (
        (narrow, GemmConfig(), 1),
        (narrow, GemmConfig(exact=0), 0),
        (wide, GemmConfig(), 0),
        (integer, GemmConfig(), 0),
        (block_sample(128, 128, False).arranged, GemmConfig(exact=0), 1),
    ):
        assert cuda_gemm.macros(weight, torch.bfloat16, config)["EXACT"] == exact


def test_one_token_spreads_over_the_columns_where_codes_have_scales_of_groups(sample, float_sample) -> None:
    for weight, tokens, config, spread in (
        (float_sample("nvfp4", 128, 256).arranged, 1, DecodeConfig(), 1),
        (float_sample("nvfp4", 128, 256).arranged, 1, DecodeConfig(spread=0), 0),
        (float_sample("mxfp8", 128, 256).arranged, 2, DecodeConfig(), 0),
        (float_sample("fp8", 128, 256).arranged, 1, DecodeConfig(), 0),
        (sample(128, 256).arranged, 1, DecodeConfig(), 0),
    ):
        assert cuda_decode.macros(weight, torch.bfloat16, tokens, config)["SPREAD"] == spread


class Launches:
    """Stands in for compiled kernels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shapes: list[driver.Shape] = []
        self.maps: list[tuple] = []
        self.sizes: list[list[int]] = []
        monkeypatch.setattr(cuda_source, "kernel", lambda name, macros, shared: self)
        monkeypatch.setattr(driver, "tensor_map", lambda *given: self.maps.append(given[1:]) or driver.TensorMap())

    def launch(self, shape, arguments, early) -> None:
        self.shapes.append(shape)
        self.sizes.append([len(bytes(argument)) for argument in arguments])


def test_decode_launches(sample, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Launches(monkeypatch)
    weight = sample(300, 200, 4, 0).arranged
    for config in (DecodeConfig(cluster=2, unit=2, grid=133), DecodeConfig(stages=3)):
        cuda_decode.decode(torch.zeros(3, 200).half(), weight, torch.zeros(3, 300).half(), config, None, True)
    assert [(shape.grid, shape.threads, shape.cluster) for shape in seen.shapes] == [
        ((132, 1), 256, 2),
        ((132, 1), 256, 1),
    ]
    assert seen.sizes == [[128, 32, 40, 4, 4]] * 2
    assert seen.maps == [(2, (64, 3, 4), (512, 128), (64, 8, 2), True)] * 2


def test_gemm_launches(sample, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Launches(monkeypatch)
    weight = sample(300, 256, 4, 128).arranged
    config = GemmConfig(tokens=64, pair=2, splits=3, tail=2)
    x, y = torch.zeros(200, 256).half(), torch.zeros(200, 300).half()
    cuda_gemm.gemm(x, weight, y, config, None, None, torch.zeros(8, dtype=torch.int32), True)
    assert config.tiles(weight, 200) == (6, 2)
    assert config.counters(weight, 200) == 4
    assert seen.shapes == [driver.Shape((2 * (6 + 2 * 3), 1), 288, config.shared_bytes(weight), 2)]
    assert seen.maps == [(2, (256, 200), (512,), (64, 32), True)]
