"""The compiler behind its cache: one compilation a source, and none that is broken kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress_llm.kernels.cuda import nvrtc

SOURCE = 'extern "C" __global__ void one(int* p) { *p = VALUE; }'
compiler = pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is not installed")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(nvrtc.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Options of every compilation, which are not really made."""
    seen: list[list[str]] = []
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(nvrtc, "_compile", lambda source, options: seen.append(options) or b"machine code")
    return seen


def test_each_source_is_compiled_once(cache: Path, compiled: list, monkeypatch: pytest.MonkeyPatch) -> None:
    for macros in ({"A": 1}, {"A": 1}, {"A": 2}):
        assert nvrtc.compile_cubin("x", macros, "sm_90a") == b"machine code"
    assert [options[-1] for options in compiled] == ["-DA=1", "-DA=2"]
    nvrtc.compile_cubin("x", {"A": 1}, "sm_100a")
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 1))
    nvrtc.compile_cubin("x", {"A": 1}, "sm_90a")
    assert len(compiled) == 4
    assert len(list(cache.iterdir())) == 4


def test_a_cache_that_cannot_be_written_costs_only_time(cache: Path, compiled: list) -> None:
    cache.write_text("a file in the way")
    for _ in range(2):
        nvrtc.compile_cubin("x", {}, "sm_90a")
    assert len(compiled) == 2


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(nvrtc.CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert nvrtc.cache_directory() == tmp_path / "compress_llm" / "kernels"


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "library", lambda: None)
    with pytest.raises(RuntimeError, match="nvidia-cuda-nvrtc"):
        nvrtc.compile_cubin(SOURCE, {}, "sm_90a")


@compiler
def test_machine_code_and_the_log_of_a_refusal(cache: Path) -> None:
    assert nvrtc.compile_cubin(SOURCE, {"VALUE": 7}, "sm_90a")[:4] == b"\x7fELF"
    with pytest.raises(nvrtc.CompileError, match="VALUE"):
        nvrtc.compile_cubin(SOURCE, {}, "sm_90a")
    assert len(list(cache.iterdir())) == 1
