"""What the launchers ask for: macros, shapes, shared memory; and that every source compiles where NVRTC is."""

from __future__ import annotations

import pytest
import torch

from compress_llm.kernels.cuda import driver, nvrtc
from compress_llm.kernels.sparse import cuda_batch, cuda_decode, cuda_source, cuda_three_layer


@pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is not installed")
def test_sources_compile(sample, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(nvrtc.CACHE_VARIABLE, str(tmp_path))
    odd = sample(72, 192, dtype=torch.float16, cut=(2, 2, 3, 2, 2)).arranged
    single = sample(72, 192, cut=(1, 3, 1, 1, 1)).arranged
    many = sample(112, 576, cut=(9, 1, 7, 7, 1)).arranged
    sources = [("decode", cuda_decode.macros(odd, 16)), ("unpack", cuda_source.variant(single))]
    sources += [("decode", cuda_decode.macros(many, 32))]
    sources += [("batch", cuda_batch.macros(single, cuda_batch.configuration(single, tokens))) for tokens in (20, 64)]
    layers = cuda_three_layer.variant(sample(72, 600, dtype=torch.float16).layers((2, 8, 2, 1, 1)))
    sources += [("three_layer", layers | {"NT": 2}), ("three_layer_unpack", layers)]
    sources += [("three_layer", cuda_three_layer.variant(sample(72, 256).layers()) | {"NT": 1})]
    sources += [("batch", cuda_batch.macros(many, cuda_batch.configuration(many, 40)))]
    for name, macros in sources:
        assert cuda_source.cubin(name, macros, "sm_90a")[:4] == b"\x7fELF"


def test_macros_say_how_a_weight_is_cut(sample) -> None:
    weight = sample(200, 328, dtype=torch.float16, cut=(2, 3, 3, 2, 1)).arranged
    assert cuda_source.variant(weight, 2) == {
        "WARPS": 2,
        "GROUPS": 3,
        "TILES": 3,
        "TOGETHER": 2,
        "UNROLL": 1,
        "RUN": 2,
        "HEAD": weight.head,
        "RING": 4,
        "HALF": 1,
        "EXACT": 0,
    }
    assert cuda_source.variant(sample(200, 384, cut=(2, 3, 3, 3, 1)).arranged)["EXACT"] == 1


class Launches:
    """Stands in for compiled kernels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shapes: list[driver.Shape] = []
        self.sizes: list[list[int]] = []
        self.counters: list[int] = []
        monkeypatch.setattr(cuda_source, "kernel", lambda name, macros, shared: self)
        monkeypatch.setattr(cuda_batch, "arrivals", lambda device, count: self.counters.append(count))

    def launch(self, shape, arguments, early) -> None:
        self.shapes.append(shape)
        self.sizes.append([len(bytes(argument)) for argument in arguments])


def test_decode_launches(sample, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Launches(monkeypatch)
    weight = sample(200, 328, cut=(2, 3, 3, 3, 1)).arranged
    cuda_decode.decode(torch.zeros(3, 328).bfloat16(), weight, torch.zeros(3, 200).bfloat16(), None, True)
    assert cuda_decode.unpack(weight, True).shape == (200, 328)
    assert seen.shapes == [driver.Shape((5, 1), 64, 2 * 8448)] * 2
    assert seen.sizes == [[8, 48, 24, 24], [48, 8, 24]]


def test_sums_may_need_more_memory_than_rings(sample) -> None:
    weight = sample(200, 320, cut=(1, 5, 8, 8, 1)).arranged
    assert cuda_decode.shared_bytes(weight, 1) == 8448
    assert cuda_decode.shared_bytes(weight, 16) == 8448
    assert cuda_decode.shared_bytes(weight, 17) == 8 * 3 * 512


def test_warps_go_through_several_streams_for_more_tokens(sample) -> None:
    weight = sample(32, 576, cut=(9, 1, 2, 2, 1)).arranged
    assert [cuda_decode.run(weight, tokens) for tokens in (1, 16, 17, 32)] == [1, 1, 2, 2]
    assert [cuda_decode.warps(weight, tokens) for tokens in (16, 17)] == [9, 5]
    assert cuda_decode.shared_bytes(weight, 17) == 9 * 8448
    assert cuda_decode.run(sample(32, 512, cut=(8, 1, 2, 2, 1)).arranged, 32) == 1


def test_batch_launches(sample, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Launches(monkeypatch)
    weight = sample(500, 328, cut=(6, 1, 3, 2, 1)).arranged  # 11 bands
    x, y = torch.zeros(70, 328).bfloat16(), torch.zeros(70, 500).bfloat16()
    config = cuda_batch.configuration(weight, 70)
    cuda_batch.batch(x, weight, y, config, None, True)
    assert config == cuda_batch.BatchConfig(40, 4, 1, 2)
    assert seen.shapes == [driver.Shape((3 * 2, 2), 512, config.shared_bytes())]
    assert seen.counters == [3 * 2]
    assert seen.sizes == [[8, 48, 24, 8, 8, 24]]


def test_three_layer_launches(sample, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Launches(monkeypatch)
    weight = sample(200, 600).layers((3, 4, 5, 1, 1))
    cuda_three_layer.multiply(torch.zeros(3, 600).bfloat16(), weight, torch.zeros(3, 200).bfloat16(), None, True)
    assert cuda_three_layer.unpack(weight, True).shape == (200, 600)
    assert seen.shapes == [driver.Shape((3, 1), 96, 3 * (3 * 5248 + 4096))] * 2
    assert seen.sizes == [[8, 32, 24], [32, 8]]


@pytest.mark.parametrize("warps", range(1, 15))
def test_tiles_on_the_way_fit(sample, warps) -> None:
    weight = sample(64, 256 * warps).layers((warps, 4, 4, 1, 1))
    stages = cuda_three_layer.variant(weight)["STAGES"]
    assert stages == (3 if warps <= 11 else 2)
    assert warps * (stages * 5248 + 4096) + 2048 <= 227 << 10


def test_no_more_tiles_on_the_way_than_there_are(sample) -> None:
    assert cuda_three_layer.variant(sample(16, 256).layers())["STAGES"] == 1


@pytest.mark.parametrize(
    ("tiles", "together", "tokens", "config"),
    [
        (3, 2, 1, (16, 4, 1, 2)),
        (3, 2, 32, (32, 4, 1, 2)),
        (3, 2, 48, (48, 4, 1, 2)),
        (2, 2, 64, (64, 4, 1, 1)),
        (3, 2, 100, (64, 4, 1, 1)),
        (4, 4, 32, (32, 4, 1, 2)),
        (4, 4, 33, (40, 2, 2, 2)),
        (4, 4, 64, (64, 2, 2, 2)),
        (5, 4, 64, (32, 4, 1, 2)),
        (7, 7, 32, (32, 2, 2, 2)),
        (7, 7, 40, (40, 2, 2, 2)),
        (7, 7, 41, (32, 2, 2, 2)),
        (6, 6, 48, (48, 2, 2, 2)),
        (8, 8, 64, (32, 2, 2, 2)),
        (8, 8, 40, (40, 2, 2, 2)),
    ],
)
def test_configurations_fit(sample, tiles, together, tokens, config) -> None:
    weight = sample(200, 328, cut=(6, 1, tiles, together, 1)).arranged
    found = cuda_batch.configuration(weight, tokens)
    assert found == cuda_batch.BatchConfig(*config)
    assert found.shared_bytes() + 2048 <= 227 << 10
    assert found.grid(weight, tokens)[1] == -(-tokens // found.tokens)


def test_configurations_of_few_streams(sample) -> None:
    for warps, config in ((1, (40, 1, 1, 2)), (2, (40, 1, 2, 2)), (3, (40, 2, 2, 2))):
        weight = sample(100, 64 * warps, cut=(warps, 1, 4, 4, 1)).arranged
        assert cuda_batch.configuration(weight, 40) == cuda_batch.BatchConfig(*config)
        assert cuda_batch.configuration(weight, 40).slices(weight) == 1
