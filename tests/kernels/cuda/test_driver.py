"""Launches as the driver sees them, through a library that only writes down what it is told."""

from __future__ import annotations

import ctypes

import pytest
import torch

from compress_llm.kernels.cuda import driver


class Recorder:
    """Stands in for libcuda: every call succeeds, or returns `code`."""

    def __init__(self, code: int = 0) -> None:
        self.calls: list[tuple[str, tuple]] = []
        self.launches: list[dict] = []
        self.code = code

    def __getattr__(self, name: str):
        def call(*arguments):
            self.calls.append((name, arguments))
            if name == "cuLaunchKernelEx":
                launch = arguments[0]._obj
                attributes = {
                    launch.attributes[i].id: list(launch.attributes[i].value[:3]) for i in range(launch.count)
                }
                self.launches.append({"grid": list(launch.grid), "block": list(launch.block), "attributes": attributes})
            if name == "cuGetErrorString":
                arguments[1]._obj.value = b"out of luck"
                return 0
            return self.code

        return call


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(driver, "library", lambda: found)

    class Stream:
        cuda_stream = 5

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream)
    driver.tensor_map.cache_clear()
    return found


def test_clusters_and_early_starts_are_asked_for(recorder: Recorder) -> None:
    kernel = driver.Kernel(b"code", "name", 1000)
    for cluster, early in ((1, False), (1, True), (2, True)):
        kernel.launch(driver.Shape((132, 1), 256, 1000, cluster), [ctypes.c_int(1)], early)
    assert [launch["attributes"] for launch in recorder.launches] == [{}, {6: [1, 0, 0]}, {4: [2, 1, 1], 6: [1, 0, 0]}]
    assert recorder.launches[0]["grid"] == [132, 1, 1]
    assert recorder.launches[0]["block"] == [256, 1, 1]


def test_a_map_is_made_once_for_a_tensor(recorder: Recorder) -> None:
    for _ in range(2):
        driver.tensor_map(4096, 2, (64, 8), (128,), (64, 8), True)
    assert [name for name, _ in recorder.calls] == ["cuTensorMapEncodeTiled"]
    place, kind, rank = recorder.calls[0][1][:3]
    assert (place.value % 64, kind, rank) == (0, 1, 2)


def test_errors_are_in_the_words_of_the_driver(recorder: Recorder) -> None:
    recorder.code = 701
    with pytest.raises(RuntimeError, match=r"cuModuleLoadData failed: out of luck \(701\)"):
        driver.Kernel(b"code", "name", 1000)


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "library", lambda: None)
    driver.tensor_map.cache_clear()
    with pytest.raises(RuntimeError, match="libcuda"):
        driver.tensor_map(4096, 2, (64, 8), (128,), (64, 8), True)


def test_pointers() -> None:
    tensor = torch.zeros(1)
    assert driver.pointer(tensor).value == tensor.data_ptr()
    assert not driver.pointer(None).value
