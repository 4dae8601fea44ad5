"""How many blocks quantise a token; and on a GPU, codes and scales that are the reference's, bit for bit."""

from __future__ import annotations

import pytest
import torch

from compress_llm.formats.float_grids import E4M3
from compress_llm.formats.grids import INT8
from compress_llm.formats.scheme import Activation
from compress_llm.kernels.activations import activation_codes
from compress_llm.kernels.cuda import driver, nvrtc
from compress_llm.kernels.lowbit import cuda_source
from compress_llm.kernels.lowbit.cuda_quantize import MOST_BLOCKS, QuantizeConfig, quantize, reasoned

HERE = nvrtc.library() is not None and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
gpu = pytest.mark.skipif(not HERE, reason="needs a GPU of compute capability 9.0 and NVRTC")
SHAPES = [(1, 4096), (1, 14336), (3, 28672), (5, 208), (16, 14336), (40, 4096), (200, 14336), (300, 16)]
CONFIGS = [
    QuantizeConfig(96, blocks, -(-512 // (96 * blocks)), exchange) for blocks in (1, 2, 3, 8) for exchange in (0, 1)
]


def tokens(count: int, features: int, dtype: torch.dtype) -> torch.Tensor:
    """Of many magnitudes; where there are three, one of zeros and one of halves of a step."""
    x = torch.randn(count, features, generator=torch.Generator().manual_seed(count + features))
    x *= torch.exp2(torch.arange(count) % 9 - 4.0)[:, None]
    if count > 2:
        x[1] = 0
        x[2] = torch.linspace(-127.5, 127.5, features)
    if count > 4:  # so small that scales, or what their inverses would be, are no normal numbers
        x[3] *= 2.0**-20 if dtype == torch.float16 else 2.0**-125
        x[4] = torch.exp2(torch.linspace(-14, 3, features))
    return x.to(dtype)


def kind(floating: bool, given: torch.Tensor | None) -> Activation:
    grid = E4M3 if floating else INT8
    return Activation(grid) if given is None else Activation(grid, granularity="tensor", dynamic=False)


def same(
    x: torch.Tensor, floating: bool, given: torch.Tensor | None = None, config: QuantizeConfig | None = None
) -> None:
    codes, scale = quantize(x.cuda(), None if given is None else given.cuda(), floating, config=config)
    expected, scales = activation_codes(x, kind(floating, given), given)
    assert torch.equal(scale.cpu(), scales.float().view(-1).expand(x.shape[0]))
    assert torch.equal(codes.cpu().to(x.dtype), expected)


def test_few_tokens_are_many_blocks_work_and_many_are_one_each() -> None:
    assert reasoned(1, 1792, 132) == QuantizeConfig(224, 8, 1)
    assert reasoned(1, 512, 132) == QuantizeConfig(128, 4, 1)
    assert reasoned(64, 1792, 132).blocks == 2
    assert reasoned(4096, 1792, 132) == QuantizeConfig(224, 1, 8)
    assert reasoned(4096, 1, 132) == QuantizeConfig(32, 1, 1)


@pytest.mark.parametrize("count", [1, 7, 64, 132, 133, 5000])
@pytest.mark.parametrize("pieces", [1, 33, 512, 1792, 3584, 100_000])
def test_every_piece_has_a_thread(count: int, pieces: int) -> None:
    config = reasoned(count, pieces, 132)
    assert config.blocks * config.threads * config.pieces >= pieces
    assert config.threads % 32 == 0
    assert config.threads <= 1024
    assert config.blocks <= MOST_BLOCKS
    assert config.blocks * (config.pieces - 1) * config.threads < pieces  # and no round is for nothing


class Launches:
    """Stands in for the compiled kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shapes: list[driver.Shape] = []
        self.macros: list[dict[str, int]] = []
        monkeypatch.setattr(cuda_source, "kernel", lambda name, macros, shared: self.macros.append(macros) or self)
        monkeypatch.setattr(torch.cuda, "device", lambda device: pytest.MonkeyPatch.context())

    def launch(self, shape, arguments, early) -> None:
        del arguments, early
        self.shapes.append(shape)


def test_only_blocks_that_exchange_are_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, x = Launches(monkeypatch), torch.zeros(3, 4096).half()
    config, scale = QuantizeConfig(128, 4, 1), torch.ones(1)
    codes, scales = quantize(x, config=config)
    assert (codes.dtype, codes.shape, scales.dtype, scales.shape) == (torch.int8, (3, 4096), torch.float32, (3,))
    assert quantize(x, scale, True, config=config)[0].dtype == torch.float8_e4m3fn
    quantize(x, config=QuantizeConfig(128, 4, 1, 0))
    assert [(shape.grid, shape.threads, shape.cluster) for shape in seen.shapes] == [
        ((12, 1), 128, 4),
        ((12, 1), 128, 1),
        ((12, 1), 128, 1),
    ]
    assert [macros["GIVEN"] for macros in seen.macros] == [0, 1, 0]
    assert quantize(x[:0])[0].shape == (0, 4096)
    assert len(seen.shapes) == 3


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("floating", [False, True])
def test_a_scale_a_token(dtype: torch.dtype, floating: bool) -> None:
    for count, features in SHAPES:
        same(tokens(count, features, dtype), floating)


@gpu
@pytest.mark.parametrize("config", CONFIGS)
def test_however_a_token_is_dealt_to_blocks(config: QuantizeConfig) -> None:
    same(tokens(7, 4096, torch.bfloat16), False, config=config)


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("floating", [False, True])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_a_scale_for_all(dtype: torch.dtype, floating: bool, stored: torch.dtype) -> None:
    for count, features in SHAPES:
        same(tokens(count, features, dtype), floating, torch.tensor([0.037], dtype=stored))


@gpu
def test_every_quotient_of_16_bit_numbers() -> None:
    for dtype, digits in ((torch.float16, 10), (torch.bfloat16, 7)):
        top = 1 + torch.arange(1 << digits) / (1 << digits)  # of the tokens, so that there is every scale
        x = torch.cat([top[:, None], torch.linspace(-1, 1, 4095).expand(len(top), -1)], 1)
        same(x.to(dtype), False)
        same(x.to(dtype), True)


@gpu
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_is_not_finite_spoils_its_token_alone(bad: float, dtype: torch.dtype) -> None:
    x = tokens(3, 4096, dtype)
    whole = quantize(x.cuda())
    x[0, 77] = bad
    codes, scale = (part.cpu() for part in quantize(x.cuda()))
    assert torch.equal(scale[:1], torch.tensor([bad]).abs()) or bool(scale[0].isnan())
    assert torch.equal(codes[1:], whole[0].cpu()[1:])
    assert torch.equal(scale[1:], whole[1].cpu()[1:])


@gpu
def test_inputs_that_start_anywhere() -> None:
    x = torch.randn(4097, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()
    assert torch.equal(quantize(x[1:].view(1, -1))[0], quantize(x[1:].clone().view(1, -1))[0])
