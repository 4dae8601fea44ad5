"""The product in every implementation there is here, against float64 and against itself."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.nn.functional import linear

from compress_llm.formats.errors import InputError
from compress_llm.kernels.registry import Pick
from compress_llm.kernels.sparse import cuda_batch, cuda_decode, cuda_three_layer, product, triton_sparse
from compress_llm.kernels.sparse.layout import Bitmap
from compress_llm.kernels.sparse.routes import Routes
from compress_llm.kernels.sparse.three_layer import ThreeLayer

gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"
)
# As large weights are cut, and as their edges are: few and many tiles, inputs and rows off the grid, one warp.
CUTS = [
    (448, 4096, (16, 4, 7, 7, 1), "even", 0.5),
    (448, 4096, (16, 4, 7, 4, 2), "even", 0.5),
    (128, 14336, (16, 14, 2, 2, 2), "even", 0.5),
    (256, 8192, (16, 8, 4, 4, 2), "even", 0.5),
    (256, 8192, (16, 8, 4, 2, 2), "skewed", 0.5),
    (4104, 4160, None, "even", 0.3),
    (4104, 4160, None, "skewed", 0.5),
    (4104, 4160, None, "rows", 0.7),
    (200, 328, (1, 6, 5, 4, 2), "even", 0.5),
    (200, 320, (5, 1, 8, 8, 1), "even", 0.5),
]
# The same for three layers: as large weights are cut, many tiles and many warps, heavy residuals, padding.
LAYERS = [
    (1792, 4096, (8, 8, 7, 1, 1), "even", 0.5, torch.bfloat16),
    (256, 14336, (14, 16, 2, 1, 1), "even", 0.5, torch.bfloat16),
    (512, 8192, (8, 16, 4, 1, 1), "skewed", 0.5, torch.float16),
    (4104, 4160, None, "even", 0.3, torch.bfloat16),
    (4104, 4160, None, "rows", 0.7, torch.float16),
    (200, 328, (1, 8, 8, 1, 1), "even", 0.5, torch.bfloat16),
    (40, 8, None, "even", 0.5, torch.bfloat16),
    (256, 4096, (11, 8, 3, 1, 1), "even", 0.9, torch.float16),
]


def test_reference(sample, error) -> None:
    weight = sample(72, 160)
    x, bias = torch.randn(2, 160), torch.ones(72)
    y = product.product(x, weight.arranged, bias)
    assert y.dtype == torch.float32
    assert error(y, weight.exact(x) + 1) < 1e-6


def test_each_pick_reaches_its_implementation(sample, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    weight = sample(64, 128)
    monkeypatch.setattr(product, "decode", lambda x, *rest: seen.append(("decode", x.shape[0])))
    monkeypatch.setattr(product, "batch", lambda x, _w, _y, config, *rest: seen.append(("batch", config.tokens)))
    monkeypatch.setattr(product, "unpack", lambda *given: seen.append("unpack") or weight.weight)
    monkeypatch.setattr(triton_sparse, "product", lambda *given: seen.append("triton"))
    monkeypatch.setattr(torch.cuda, "device", lambda place: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: Pick("no such device", ""))
    monkeypatch.setattr(product, "routes", lambda name: Routes(decode=1, batch=20))
    name = "cuda"
    monkeypatch.setattr(product, "picked", lambda *given: Pick(name, ""))
    for tokens in (1, 20, 21):
        product.product(torch.zeros(tokens, 128).bfloat16(), weight.arranged)
    product.product(torch.zeros(1, 128).bfloat16(), weight.arranged, route="batch")
    name = "triton"
    product.product(torch.zeros(1, 128).bfloat16(), weight.arranged)
    assert seen == [("decode", 1), ("batch", 32), "unpack", ("batch", 16), "triton"]
    with pytest.raises(InputError, match=r"stored for torch\.bfloat16"):
        product.product(torch.zeros(1, 128).half(), weight.arranged)


def test_no_tokens_is_no_work(sample, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "dense", None)
    for weight in (sample(64, 128).arranged, sample(64, 128).layers()):
        assert product.product(torch.zeros(0, 128).bfloat16(), weight).shape == (0, 64)


def test_three_layers_mean_the_same(sample, error) -> None:
    weight = sample(72, 160)
    x, bias = torch.randn(2, 160), torch.ones(72)
    assert error(product.product(x, weight.layers(), bias), weight.exact(x) + 1) < 1e-6


def test_three_layers_of_a_handful_of_tokens_stream(sample, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    weight = sample(64, 128)
    monkeypatch.setattr(cuda_three_layer, "multiply", lambda x, *rest: seen.append(x.shape[0]))
    monkeypatch.setattr(cuda_three_layer, "unpack", lambda *given: seen.append("unpack") or weight.weight)
    monkeypatch.setattr(torch.cuda, "device", lambda place: nullcontext())
    monkeypatch.setattr(product, "picked", lambda *given: Pick("three-layer", ""))
    for tokens in (1, 16, 17):
        product.product(torch.zeros(tokens, 128).bfloat16(), weight.layers())
    product.product(torch.zeros(1, 128).bfloat16(), weight.layers(), route="dense")
    assert seen == [1, 16, "unpack", "unpack"]
    with pytest.raises(InputError, match=r"stored for torch\.bfloat16"):
        product.product(torch.zeros(1, 128).half(), weight.layers())


def test_what_is_picked_says_the_layout(sample, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = sample(64, 128).weight
    assert isinstance(product.arrange(weight), Bitmap)
    monkeypatch.setattr(product, "pick", lambda problem, asked: Pick(asked or "cuda", problem.sparse))
    assert isinstance(product.arrange(weight, "three-layer"), ThreeLayer)
    assert isinstance(product.arrange(weight, "triton"), Bitmap)
    assert product.picked(product.arrange(weight, "three-layer"), 1, torch.bfloat16).reason == "three-layer"
    assert product.picked(product.arrange(weight), 1, torch.bfloat16).reason == "bitmap"


def test_three_layers_do_not_run_where_they_cannot(sample) -> None:
    with pytest.raises(InputError, match="kernel 'three-layer': it cannot run here"):
        product.arrange(sample(64, 128).weight, "three-layer")


@gpu
@pytest.mark.parametrize(("rows", "columns", "cut", "kind", "kept"), CUTS)
def test_cuda_against_float64(sample, error, device, rows, columns, cut, kind, kept) -> None:
    weight = sample(rows, columns, kept, kind, device=device, cut=cut)
    assert torch.equal(cuda_decode.unpack(weight.arranged, True).cpu(), weight.weight)
    dense, again = weight.weight.to(device), weight.arranged.clone()
    torch.cuda.synchronize()
    bias = torch.randn(rows, device=device).bfloat16()
    for tokens in (1, 8, 13, 16, 17, 32, 64, 100):
        x = torch.randn(tokens, columns, device=device).bfloat16()
        exact = weight.exact(x) + bias.double().cpu()
        limit = 1.5 * error(linear(x, dense, bias), exact)
        for route in ("decode", "batch", "dense"):
            y = product.product(x, weight.arranged, bias, "cuda", route)
            assert error(y, exact) < limit, (tokens, route)
            assert torch.equal(y, product.product(x, again, bias, "cuda", route, pdl=False)), (tokens, route)


@gpu
@pytest.mark.parametrize(("rows", "columns", "cut", "kind", "kept", "dtype"), LAYERS)
def test_three_layers_against_float64(sample, error, device, rows, columns, cut, kind, kept, dtype) -> None:
    weight = sample(rows, columns, kept, kind, dtype, device)
    layers = weight.layers(cut)
    again, dense = layers.clone(), weight.weight.to(device)
    torch.cuda.synchronize()
    assert torch.equal(cuda_three_layer.unpack(layers, True).view(torch.int16), dense.view(torch.int16))
    bias = torch.randn(rows, device=device).to(dtype)
    for tokens in (1, 2, 8, 13, 16, 17, 100):
        x = torch.randn(tokens, columns, device=device).to(dtype)
        exact = weight.exact(x) + bias.double().cpu()
        y = product.product(x, layers, bias, "three-layer")
        assert error(y, exact) < 1.5 * error(linear(x, dense, bias), exact), tokens
        assert torch.equal(y, product.product(x, again, bias, pdl=False)), tokens


@gpu
@pytest.mark.parametrize("kept", [0.0, 1.0])
def test_three_layers_of_empty_and_full_weights(sample, error, device, kept) -> None:
    weight = sample(200, 2048, kept, dtype=torch.float16, device=device)
    layers = weight.layers()
    torch.cuda.synchronize()
    for tokens in (1, 20):
        x = torch.randn(tokens, 2048, device=device).half()
        y = product.product(x, layers)
        assert error(y, weight.exact(x)) < 2e-3 if kept else int(y.count_nonzero()) == 0


@gpu
@pytest.mark.parametrize("tokens", [1, 16])
def test_many_launches_of_three_layers_that_overlap(sample, device, tokens) -> None:
    layers = sample(1792, 4096, device=device).layers()
    torch.cuda.synchronize()
    x = torch.randn(tokens, 4096, device=device).bfloat16()
    first = product.product(x, layers)
    results = [product.product(x, layers) for _ in range(500)]
    assert all(torch.equal(first, y) for y in results)


@gpu
@pytest.mark.parametrize("kept", [0.0, 1.0])
def test_cuda_on_empty_and_full_weights(sample, error, device, kept) -> None:
    weight = sample(200, 2048, kept, dtype=torch.float16, device=device)
    for tokens in (1, 20):
        x = torch.randn(tokens, 2048, device=device).half()
        y = product.product(x, weight.arranged, None, "cuda")
        assert error(y, weight.exact(x)) < 2e-3 if kept else int(y.count_nonzero()) == 0


@gpu
@pytest.mark.parametrize("route", ["decode", "batch"])
def test_many_launches_that_overlap(sample, device, route) -> None:
    weight = sample(1792, 4096, device=device)
    tokens = 16 if route == "decode" else 40
    x = torch.randn(tokens, 4096, device=device).bfloat16()
    first = product.product(x, weight.arranged, None, "cuda", route)
    results = [product.product(x, weight.arranged, None, "cuda", route) for _ in range(500)]
    assert all(torch.equal(first, y) for y in results)


@gpu
def test_every_size_of_a_batch(sample, error, device) -> None:
    weight = sample(448, 4096, device=device)
    for size in cuda_batch.TILES:
        x, y = torch.randn(70, 4096, device=device).bfloat16(), torch.empty(70, 448, device=device).bfloat16()
        for ways, run in ((4, 1), (2, 2), (2, 1)):
            cuda_batch.batch(x, weight.arranged, y, cuda_batch.BatchConfig(size, ways, run, 1), None, False)
            assert error(y, weight.exact(x)) < 3e-3
