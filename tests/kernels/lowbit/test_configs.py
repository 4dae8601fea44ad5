"""Configurations: whatever is picked fits the device, and what was measured is found again."""

from __future__ import annotations

import json

import pytest
import torch

from compress_llm.kernels.cuda import nvrtc
from compress_llm.kernels.lowbit import configs
from compress_llm.kernels.lowbit.cuda_decode import DecodeConfig
from compress_llm.kernels.lowbit.cuda_gemm import GemmConfig
from compress_llm.kernels.lowbit.layout import Arranged

ZEROS = {None: None, "z": torch.uint8, "f": torch.bfloat16}
TOKENS = (1, 3, 4, 8, 9, 16, 17, 32, 48, 64, 100, 256, 512, 1024, 5000)


def weight(rows=14336, columns=4096, bits=4, group=128, zero=None, narrow=False, floating=False) -> Arranged:
    """A weight without contents: sizes are all that a configuration depends on."""
    codes = torch.empty(-(-rows // 128), -(-columns // 128), 0, dtype=torch.uint8)
    zeros = None if zero is None else torch.empty(0, dtype=ZEROS[zero])
    scales = None if not group and (narrow or floating) else torch.empty(0)
    return Arranged(codes, scales, zeros, bits, group, rows, columns, floating, narrow)


def shared(config: configs.Config, given: Arranged, tokens: int) -> int:
    return config.shared_bytes(given, tokens) if isinstance(config, DecodeConfig) else config.shared_bytes(given)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero", [None, "z", "f"])
def test_reasoned_configurations_fit_and_are_legal(bits: int, zero: str | None) -> None:
    for rows, columns in ((14336, 4096), (4096, 14336), (8192, 8192), (64, 64), (4104, 4160), (128256, 4096)):
        for group in (32, 64, 128, 0):
            given = weight(rows, columns, bits, group, None if bits == 8 and zero == "z" else zero)
            for tokens in TOKENS:
                config = configs.reasoned(given, tokens, 132)
                assert shared(config, given, tokens) <= configs.MOST_DYNAMIC
                assert isinstance(config, DecodeConfig) == (tokens <= 16)
                if isinstance(config, DecodeConfig):
                    assert 2 <= config.depth <= 2 * config.pairs
                else:
                    assert config.stages >= 2
                    assert config.tiles(given, tokens)[0] >= 0


def test_integer_activations_always_take_the_tensor_tiles() -> None:
    assert all(isinstance(configs.reasoned(weight(bits=8, group=0, narrow=True), m, 132), GemmConfig) for m in TOKENS)


@pytest.mark.parametrize(
    ("bits", "group", "kind"), [(4, 16, "f4g16"), (4, 32, "f4g32"), (8, 32, "f8g32"), (8, 0, "f8")]
)
def test_floating_point_weights_have_their_own(bits: int, group: int, kind: str) -> None:
    for rows, columns in ((14336, 4096), (64, 64), (128256, 4096)):
        given = weight(rows, columns, bits, group, floating=True)
        assert configs.kind(given) == kind
        for tokens in TOKENS:
            assert shared(configs.reasoned(given, tokens, 132), given, tokens) <= configs.MOST_DYNAMIC
    assert configs.kind(weight(bits=8, group=0, narrow=True, floating=True)) == "f8a8"


@pytest.mark.parametrize(
    ("bits", "floating", "kind"), [(8, False, "w8a8b"), (8, True, "f8a8b"), (4, False, "w4a8"), (4, True, "w4af8")]
)
def test_8_bit_products_of_scaled_blocks_have_their_own(bits: int, floating: bool, kind: str) -> None:
    for rows, columns in ((14336, 4096), (4096, 4096), (4096, 14336), (128, 128), (4104, 4096)):
        given = weight(rows, columns, bits, 128, narrow=True, floating=floating)
        assert configs.kind(given) == kind
        for tokens in TOKENS:
            config = configs.reasoned(given, tokens, 132)
            assert isinstance(config, GemmConfig)
            assert shared(config, given, tokens) <= configs.MOST_DYNAMIC


def test_a_cluster_shares_tokens_or_divides_the_inputs() -> None:
    for rows in (4096, 8192, 14336):
        config = configs.reasoned(weight(rows, 4096, 8, 0, narrow=True), 300, 132)
        assert 1 in (config.pair, config.depth)


def test_few_tiles_are_cut_along_the_inputs() -> None:
    assert configs.reasoned(weight(4096, 14336), 64, 132).depth == 2
    assert configs.reasoned(weight(4096, 14336), 1, 132).cluster == 2
    late = configs.reasoned(weight(14336, 4096), 1024, 132)
    assert (late.splits, late.tiles(weight(14336, 4096), 1024)) == (2, (396, 52))


def test_every_shipped_row_can_be_read_and_fits() -> None:
    tables = json.loads(configs.SHIPPED.read_text())
    assert "NVIDIA H200" in tables
    for key, row in tables["NVIDIA H200"].items():
        kind, size, tokens = key.split()
        rows, columns = map(int, size.split("x"))
        narrow = "a" in kind
        group = int(kind.split("g")[1].rstrip("zf")) if "g" in kind else 128 if narrow and kind[-3:] != "8a8" else 0
        zero = kind[-1] if kind[-1] in "zf" else None
        given = weight(rows, columns, int(kind[1]), group, zero, narrow, kind[0] == "f" or kind == "w4af8")
        assert (configs.kind(given), configs.bucket(int(tokens))) == (kind, int(tokens))
        config = configs.read(row)
        assert configs.written(config) == row
        assert shared(config, given, int(tokens)) <= configs.MOST_DYNAMIC


def test_buckets() -> None:
    assert [configs.bucket(m) for m in (1, 3, 5, 17, 33, 65, 200, 513, 3000)] == [1, 4, 8, 32, 48, 128, 256, 1024, 4096]


def test_what_was_measured_here_is_preferred(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nvrtc.CACHE_VARIABLE, str(tmp_path))
    configs.tuned.cache_clear()
    key, config = "w4g128 4096x14336 64", GemmConfig(tokens=32)
    assert configs.read(configs.tuned("NVIDIA H200")[key]) != config
    configs.keep("NVIDIA H200", {key: configs.written(config)})
    configs.keep("NVIDIA H200", {"w4 1x1 1": configs.written(GemmConfig())})
    assert configs.read(configs.tuned("NVIDIA H200")[key]) == config
    assert configs.read(configs.tuned("NVIDIA H200")["w4 1x1 1"]) == GemmConfig()
    configs.keep("NVIDIA H200", {key: {"gemm": {"tokens": 32, "of_another_version": 1}}, "w4 2x2 1": {"else": {}}})
    assert configs.tuned("NVIDIA H200")[key] == json.loads(configs.SHIPPED.read_text())["NVIDIA H200"][key]
    assert "w4 2x2 1" not in configs.tuned("NVIDIA H200")
    configs.tuned.cache_clear()


def test_a_configuration_for_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class About:
        name, multi_processor_count = "NVIDIA H200", 132

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: About)
    place = torch.device("cuda", 0)
    assert configs.configuration(weight(4096, 14336), 30, place).splits == 4
    assert configs.configuration(weight(8192, 2048), 1, place) == configs.reasoned(weight(8192, 2048), 1, 132)
