"""What kernels are put together from."""

from __future__ import annotations

import pytest

from compress_llm.kernels.cuda import source


@pytest.mark.parametrize("columns", [16, 64, 256])
def test_the_generated_instruction_names_every_register(columns: int) -> None:
    text = source.wgmma(columns, "bf16")
    assert f"m64n{columns}k16.f32.bf16.bf16" in text
    assert text.count('"+f"') == columns // 2
    assert f"%{columns // 2 + 4}, p, 1, 1, 0;" in text


@pytest.mark.parametrize(
    ("kind", "types", "rest"), [("s8", "s32.s8.s8", "p;}"), ("e4m3", "f32.e4m3.e4m3", "p, 1, 1;}")]
)
def test_instructions_of_8_bit_activations(kind: str, types: str, rest: str) -> None:
    text = source.wgmma(16, kind)
    assert f"m64n16k32.{types} " in text
    assert f"%12, {rest}" in text
