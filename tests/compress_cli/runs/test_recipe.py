"""Recipes: flags, YAML and dictionaries give one object, and every mistake is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress_llm.compress_cli.runs.recipe import Recipe, Rule, from_dict, load, override
from compress_llm.formats.errors import InputError


def test_dictionary_form_comes_back_equal() -> None:
    recipe = Recipe(scheme="W8A8", targets=("a",), rules=(Rule("b", "W4A16", group_size=32),), options={"gptq": {}})
    assert from_dict(recipe.as_dict()) == recipe


def test_yaml_file_with_both_spellings(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("scheme: W4A16\ngroup-size: 64\nnum_samples: 4\nignore: lm_head\n")
    assert load(file) == Recipe(group_size=64, num_samples=4, ignore=("lm_head",))


def test_flags_win_over_the_file() -> None:
    assert override(Recipe(scheme="W8A8", seed=3), {"scheme": "W4A16", "seed": None, "ignore": ()}) == Recipe(seed=3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("shceme: W4A16", ("shceme", "did you mean 'scheme'")),
        ("scheme: W4A61", ("W4A61", "did you mean")),
        ("group_size: 1.5", ("group_size", "1.5")),
        ("group_size: 0", ("group-size 0", "positive")),
        ("num_samples: true", ("num_samples", "True")),
        ("num_samples: 0", ("--num-samples 0", "at least 1")),
        ("rules: [{scheme: W4A16}]", ("rules", "target")),
        ("rules: [{target: a, shceme: W4A16}]", ("shceme", "scheme")),
        ("ignore: [1, null]", ("ignore", "list of strings")),
        ("seed: 99999999999999999999", ("--seed", "out of range")),
        ("lm_head: W61", ("--lm-head W61",)),
        ("sparsity: 0.5", ("--sparsity 0.5", "drops no weights")),
        ("{scheme: SPARSE50, sparsity: 0.9}", ("--sparsity 0.9", "out of range")),
        ("{scheme: SPARSE50, pattern: '3:5'}", ("--pattern 3:5",)),
        ("{scheme: SPARSE50, sparsity: 0.6, pattern: '2:4'}", ("--sparsity 0.6", "2:4")),
        ("{scheme: SPARSE50, sparse_layout: bitmaps}", ("--sparse-layout bitmaps", "did you mean 'bitmap'")),
        ("{scheme: SPARSE50_W4A16, sparse_layout: bitmap}", ("--sparse-layout bitmap", "no such layout")),
        ("{scheme: SPARSE50, pattern: 2:4}", ("pattern", "124", "put it in quotes")),
        ("- a", ("mapping",)),
        ("a: [", ("YAML",)),
        ("{scheme: W4A16, scheme: W8A8}", ("'scheme' is given twice",)),
        ("{group-size: 64, group_size: 32}", (": group_size: is given twice",)),
        ("dataset: 2024-13-45", ("is not valid YAML (month must be",)),
        ("seed: !!int abc", ("is not valid YAML",)),
        ("dataset: ''", ("--dataset '': is empty",)),
        ("targets: 5", ("where a list or text belongs",)),
        ("a: " + "[" * 3000, ("is not valid YAML",)),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        load(file)
    assert all(word in str(caught.value) for word in words)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load(tmp_path / "none.yaml")
