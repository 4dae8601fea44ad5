"""Block sizes: the scheme's own, one that is asked for, and what fits neither."""

from __future__ import annotations

import pytest

from compress_llm.formats.errors import InputError
from compress_llm.formats.scheme import SCHEMES
from compress_llm.quantizers.hadamard import HADAMARD, block_size


@pytest.mark.parametrize(
    ("group", "width", "block"),
    [
        (32, 576, 32),
        (64, 576, 64),
        (16, 576, 64),
        (16, 4096, 128),
        (48, 576, 64),
        (128, 4096, 128),
        ("channel", 576, 64),
        ("channel", 4096, 128),
    ],
)
def test_the_block_of_a_scale_or_the_largest_that_divides(group: int | str, width: int, block: int) -> None:
    assert block_size(SCHEMES["W4A16"].with_group(group), width, HADAMARD.options) == block  # type: ignore[arg-type]


def test_one_that_is_asked_for() -> None:
    assert block_size(SCHEMES["W8A8"], 576, {"block": 16}) == 16
    assert block_size(SCHEMES["W8A8"], 4096, {"block": 512}) == 512


@pytest.mark.parametrize(
    ("width", "block", "words"),
    [(576, 128, "use 2, 4, 8, 16, 32, 64"), (576, 48, "block 48"), (576, 1, "block 1"), (81, 0, "no power of two")],
)
def test_one_that_does_not_fit(width: int, block: int, words: str) -> None:
    with pytest.raises(InputError) as caught:
        block_size(SCHEMES["W8A8"], width, {"block": block})
    assert words in str(caught.value) and str(width) in str(caught.value)
