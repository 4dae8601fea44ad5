"""The search keeps the fastest configuration that is right, and never one that is only fast."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compress_llm.compress_cli.runs import bench_kernels, tune
from compress_llm.compress_cli.runs.timing import Timing
from compress_llm.formats.errors import InputError
from compress_llm.formats.progress import silent
from compress_llm.formats.scheme import scheme
from compress_llm.kernels.cuda import nvrtc
from compress_llm.kernels.lowbit import configs
from compress_llm.kernels.lowbit.cuda_decode import DecodeConfig
from compress_llm.kernels.lowbit.cuda_gemm import GemmConfig
from compress_llm.kernels.lowbit.product import reference

CPU = torch.device("cpu")
NOW = DecodeConfig()
WRONG, BROKEN, BETTER = replace(NOW, warps=16), replace(NOW, warps=12), replace(NOW, warps=4)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path) -> dict[object, float]:
    """A GPU that is none: the microseconds of each configuration."""
    times: dict[object, float] = {NOW: 10.0, WRONG: 1.0, BETTER: 8.0}

    def run(x, weight, y, config, bias, token_scale) -> None:
        if config == BROKEN:
            raise RuntimeError("too many resources requested")
        y.copy_(reference(x, weight, bias, token_scale, y.dtype) * (1.1 if config == WRONG else 1.0))

    class About:
        name, multi_processor_count = "a GPU", 132

    monkeypatch.setenv(nvrtc.CACHE_VARIABLE, str(tmp_path))
    configs.tuned.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: About)
    monkeypatch.setattr(tune, "picked", lambda *given, asked: None)
    monkeypatch.setattr(tune, "run", run)
    monkeypatch.setattr(tune, "_compile", lambda *given: None)
    monkeypatch.setattr(configs, "configuration", lambda *given: NOW)
    monkeypatch.setattr(tune, "neighbours", lambda *given: (WRONG, BROKEN, BETTER, NOW))

    def interleaved(candidates, place):
        times_of = {repr(config): value for config, value in times.items()}
        return {name: Timing(times_of[name], 0.0, 0.0) for name in candidates}

    monkeypatch.setattr(tune, "interleaved", interleaved)
    return times


def search() -> list[tune.Tuned]:
    return list(tune.tune([(scheme("W4A16"), (72, 128))], (2,), CPU, silent))


def test_the_fastest_right_one_is_kept_for_later(device) -> None:
    (found,) = search()
    assert (found.before_us, found.after_us, found.tried, found.wrong, found.failed) == (10.0, 8.0, 4, 1, 1)
    assert found.config == {"decode": {"warps": 4}}
    key = "w4g128 72x128 2"
    assert found.key == key
    assert configs.read(configs.tuned("a GPU")[key]) == BETTER
    configs.tuned.cache_clear()


def test_noise_changes_nothing(device) -> None:
    device[BETTER] = 9.9
    (found,) = search()
    assert found.config == {"decode": {}}
    assert not configs.user_file().exists()


def test_without_cuda_kernels_there_is_nothing_to_search() -> None:
    with pytest.raises(InputError, match="kernel 'cuda'"):
        list(tune.tune([(scheme("W4A16"), (72, 128))], (1,), CPU, silent))


@pytest.mark.parametrize("tokens", [1, 16, 64, 300])
def test_candidates_fit(tokens: int) -> None:
    weight = bench_kernels.Weights(scheme("W8A16"), (256, 4096), CPU, torch.bfloat16).arranged[0]
    now = configs.reasoned(weight, tokens, 132)
    now = replace(now, depth=2) if isinstance(now, GemmConfig) else now
    found = list(tune.neighbours(weight, tokens, now))
    assert len(set(found)) > 4
    for config in found:
        assert isinstance(config, DecodeConfig) or 1 in (config.pair, config.depth)  # the kernel has no other clusters
        needed = config.shared_bytes(weight) if isinstance(config, GemmConfig) else config.shared_bytes(weight, tokens)
        assert needed <= configs.MOST_DYNAMIC
