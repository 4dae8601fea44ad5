"""The embedded model and text are there, and their absence is said plainly."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress_llm.calibration import embedded
from compress_llm.formats.errors import InputError


def test_model_and_texts_are_in_the_package() -> None:
    assert (embedded.model_path() / "model.safetensors").is_file()
    assert embedded.text_path("test").is_file()
    assert embedded.text_path("calibration").read_bytes() != embedded.text_path("test").read_bytes()


def test_a_stripped_installation_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedded, "_ASSETS", tmp_path)
    with pytest.raises(InputError, match="lacks bookllama-7m"):
        embedded.model_path()
    with pytest.raises(InputError, match="lacks wiki-test.txt"):
        embedded.text_path("test")
