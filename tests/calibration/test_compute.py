"""The probe picks the faster dtype, and needs a clear lead to leave float32."""

from __future__ import annotations

import pytest
import torch

from compress_llm.calibration import compute


@pytest.mark.parametrize(("float32", "bfloat16", "chosen"), [(1.0, 0.2, torch.bfloat16), (1.0, 0.9, torch.float32)])
def test_the_clearly_faster_one(
    float32: float, bfloat16: float, chosen: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {torch.float32: float32, torch.bfloat16: bfloat16}
    monkeypatch.setattr(compute, "_seconds", times.__getitem__)
    assert compute.probed_dtype() == chosen


def test_the_timing_is_a_time() -> None:
    assert 0 < compute._seconds(torch.float32, size=8, repeats=1) < 1
