"""Schemes by linear: the mistakes of a recipe are called what the user wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress_llm.compress_cli.runs.choices import Choice, chosen_schemes, remarks
from compress_llm.compress_cli.runs.plan import make_plan
from compress_llm.compress_cli.runs.recipe import Recipe, from_dict
from compress_llm.formats.architectures import ARCHITECTURES
from compress_llm.formats.checkpoint import Checkpoint
from compress_llm.formats.errors import InputError
from compress_llm.formats.scheme import SCHEMES

UP, DOWN, HEAD = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "lm_head"


def choices(directory: Path, **recipe: object) -> dict[str, Choice]:
    names = {name: f"{name}.weight" for name in (UP, DOWN, HEAD)}
    return chosen_schemes(from_dict(recipe), ARCHITECTURES["llama"], names, Checkpoint.open(directory))


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        (
            {},
            f"--scheme W4A16: has groups of 128, which do not divide the 64 inputs of {UP}; add --group-size 32, 16, "
            "channel or auto.",  # what divides the 96 inputs of others too
        ),
        (
            {"group_size": 48},
            f"--group-size 48: does not divide the 64 inputs of {UP}; use 32, 16, channel or auto.",
        ),
        (
            {"scheme": "W8A16", "lm_head": "w4a16_hqq", "rules": [{"target": DOWN, "scheme": "W4A8"}]},
            f"rules: scheme W4A8: has groups of 128, which do not divide the 96 inputs of {DOWN}; add rules: "
            "group_size 96, 48, 32, 24, channel or auto.",
        ),
        (
            {"scheme": "W8A16", "lm_head": "W4A16"},
            f"--lm-head W4A16: has groups of 128, which do not divide the 64 inputs of {HEAD}; add --group-size 64, "
            "32, 16, channel or auto.",
        ),
        (
            {"scheme": "W8A16", "rules": [{"target": DOWN, "scheme": "W8A16", "group_size": 36}]},
            f"rules: group_size 36: does not divide the 96 inputs of {DOWN}; use 96, 48, 32, 24, channel or auto.",
        ),
        (
            {"scheme": "W8A16", "rules": [{"target": DOWN, "scheme": "W8A8", "group_size": 32}]},
            "rules: group_size 32: scheme W8A8 has one scale an output row; leave it out.",
        ),
        (
            {"scheme": "W8A16", "lm_head": "W8A16", "ignore": ["lm_*"]},
            "--lm-head W8A16: --ignore takes in lm_head; leave one of the two out.",
        ),
        ({"rules": [{"target": DOWN, "scheme": "W8A9"}]}, "rules: scheme W8A9: no scheme has this name"),
        ({"rules": [{"target": DOWN, "scheme": "W8A8", "group_size": 0}]}, "rules: group_size 0: is not a group size"),
    ],
)
def test_a_mistake_is_called_what_was_written(tiny_llama: Path, recipe: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        choices(tiny_llama, **recipe)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("size", [32, "auto"])
def test_a_head_whose_scheme_has_no_choice_keeps_its_own_groups(tiny_llama: Path, size: int | str) -> None:
    found = choices(tiny_llama, group_size=size, lm_head="FP8_DYNAMIC")
    assert found[HEAD] == SCHEMES["FP8_DYNAMIC"]
    assert found[UP] == SCHEMES["W4A16"].with_group(32 if size == 32 else 64)
    assert choices(tiny_llama, group_size=32, lm_head="W8A16")[HEAD] == SCHEMES["W8A16"].with_group(32)


def test_groups_to_be_fitted_where_there_is_no_choice_are_told(tiny_llama: Path) -> None:
    rules = [{"target": DOWN, "scheme": "W8A8", "group_size": "auto"}, {"target": "nothing", "scheme": "W8A16"}]
    said = list(remarks(from_dict({"scheme": "NVFP4", "group_size": "auto", "rules": rules})))
    assert said == [
        "--group-size auto changes nothing: scheme NVFP4 has groups of 16",
        "rules: group_size auto changes nothing: scheme W8A8 has one scale an output row",
    ]
    assert not list(remarks(Recipe(group_size="auto"))) and not list(remarks(Recipe(scheme="NVFP4")))
    plan = make_plan(Recipe(scheme="MXFP8", group_size="auto"), Checkpoint.open(tiny_llama))
    assert plan.warnings == ("--group-size auto changes nothing: scheme MXFP8 has groups of 32",)
