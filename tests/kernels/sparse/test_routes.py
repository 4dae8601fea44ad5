"""Which kernel takes how many tokens."""

from __future__ import annotations

from compress_llm.kernels.sparse.routes import Routes, routes


def test_routes_by_tokens() -> None:
    some = Routes(decode=8, batch=64)
    assert [some.name(tokens) for tokens in (1, 8, 9, 64, 65)] == ["decode", "decode", "batch", "batch", "dense"]
    tall = Routes(decode=8, batch=64, tall=40)
    assert [tall.name(tokens, 5) for tokens in (1, 9, 40, 41)] == ["decode", "decode", "decode", "dense"]
    assert [tall.name(tokens, 4) for tokens in (1, 9, 64, 65)] == ["decode", "batch", "batch", "dense"]


def test_unknown_devices_have_routes_too() -> None:
    assert routes("no such device") == Routes()
    assert routes("NVIDIA H200").decode <= 16
