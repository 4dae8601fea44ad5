"""Patterns: names, globs, expressions; one that matches nothing is an error."""

from __future__ import annotations

import pytest

from compress_llm.compress_cli.runs.patterns import matching
from compress_llm.formats.errors import InputError

NAMES = [f"model.layers.{n}.mlp.{p}_proj" for n in range(12) for p in ("up", "down")] + ["lm_head"]


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("model.layers.1.mlp.up_proj", 1),
        ("model.layers.1.mlp.up_proj.weight", 1),
        ("*.down_proj", 12),
        ("up_proj", 12),
        ("mlp.up_proj", 12),
        ("re:.*layers\\.1[01]\\..*", 4),
        ("lm_head", 1),
    ],
)
def test_what_a_pattern_matches(pattern: str, count: int) -> None:
    assert len(matching([pattern], NAMES, "--ignore")) == count


def test_nothing_matched_names_the_pattern_and_a_near_name() -> None:
    with pytest.raises(
        InputError, match=r"--ignore model.layers.0.mlp.up_pro: .*did you mean 'model.layers.0.mlp.up_proj'"
    ):
        matching(["model.layers.0.mlp.up_pro"], NAMES, "--ignore")


def test_broken_expression() -> None:
    with pytest.raises(InputError, match="regular expression"):
        matching(["re:("], NAMES, "--target")
