"""The word for a device."""

from __future__ import annotations

import pytest
import torch

from compress_llm.compress_cli.runs.device import pick_device
from compress_llm.formats.errors import InputError


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    return request.param


@pytest.mark.parametrize(
    ("gpus", "word", "device"),
    [(0, "auto", "cpu"), (2, "auto", "cuda:0"), (2, "cpu", "cpu"), (2, "cuda", "cuda:0"), (2, "cuda:1", "cuda:1")],
    indirect=["gpus"],
)
def test_words(gpus: int, word: str, device: str) -> None:
    assert pick_device(word) == torch.device(device)


@pytest.mark.parametrize(
    ("gpus", "word", "cause"),
    [
        (0, "cuda", "sees no CUDA GPU;"),
        (1, "cuda:1", "sees 1 CUDA GPU;"),
        (2, "cuda:2", "sees 2 CUDA GPUs;"),
        (2, "gpu", "is not a device"),
        (2, "cuda:", "is not a device"),
    ],
    indirect=["gpus"],
)
def test_refusals(gpus: int, word: str, cause: str) -> None:
    with pytest.raises(InputError, match=f"--device {word}: .*{cause}"):
        pick_device(word)
