"""Bytes and seconds as people read them."""

from __future__ import annotations

import pytest

from compress_llm.compress_cli.units import size_text, time_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (13_644_224, "13.6 MB"),
        (999_949_999, "999.9 MB"),
        (999_960_000, "1.0 GB"),
        (2.5e15, "2500.0 TB"),
        (-2000, "-2.0 kB"),
    ],
)
def test_sizes(count: float, text: str) -> None:
    assert size_text(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3661.2, "1:01:01")])
def test_times(seconds: float, text: str) -> None:
    assert time_text(seconds) == text
