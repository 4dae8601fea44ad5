"""Method lists: names, order, settings and fit are checked before any work."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from compress_llm.compress_cli.runs.methods import (
    ROTATIONS,
    ROUNDINGS,
    SPARSIFIERS,
    TRANSFORMS,
    chain,
    check_fit,
    fields_wanted,
)
from compress_llm.compress_cli.runs.recipe import Recipe
from compress_llm.formats.errors import InputError
from compress_llm.formats.scheme import SCHEMES


def test_transform_then_rounding() -> None:
    found = chain(Recipe(method="awq,gptq", options={"gptq": {"damp": 0.02}}))
    assert [transform.name for transform, _ in found.transforms] == ["awq"]
    assert found.rounding.name == "gptq" and found.options["damp"] == 0.02
    assert found.label(SCHEMES["W4A16"]) == "awq,gptq"


def test_a_transform_alone_brings_its_own_rounding() -> None:
    found = chain(Recipe(method="awq"))
    assert found.rounding.name == "rtn" and found.options["scale_rule"] == "local-hessian"
    assert chain(Recipe(method="awq", scale_rule="minmax")).options["scale_rule"] == "minmax"


def test_plain_rounding_needs_no_text_and_static_inputs_do() -> None:
    assert fields_wanted(chain(Recipe()), {SCHEMES["W4A16"]}) == frozenset()
    assert fields_wanted(chain(Recipe()), {SCHEMES["W8A8_STATIC"]}) == {"abs_max"}
    assert "second_moment" in fields_wanted(chain(Recipe(scale_rule="local-hessian")), {SCHEMES["W4A16"]})


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (Recipe(method="gtpq"), ("gtpq", "did you mean 'gptq'")),
        (Recipe(method=""), ("names no method",)),
        (Recipe(method="gptq,awq"), ("gptq", "must come last")),
        (Recipe(method="awq,awq,rtn"), ("twice",)),
        (Recipe(method="hadamard,awq,rtn"), ("hadamard", "put awq first")),
        (Recipe(method="hadamard,hadamard"), ("hadamard",)),
        (Recipe(method="hadamrd"), ("did you mean 'hadamard'",)),
        (Recipe(method="hadamard", options={"hadamard": {"block": "wide"}}), ("block", "int")),
        (Recipe(method="auto,gptq"), ("auto",)),
        (Recipe(scale_rule="msee"), ("--scale-rule msee", "mse")),
        (Recipe(options={"awq": {}}), ("options: awq", "rtn")),
        (Recipe(method="gptq", options={"gptq": {"dampp": 1}}), ("dampp", "did you mean 'damp'")),
    ],
)
def test_mistakes_are_named(recipe: Recipe, words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        chain(recipe)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_method_that_does_not_fit_the_scheme() -> None:
    with pytest.raises(InputError, match="smoothquant: does not fit W4A16"):
        check_fit(chain(recipe := Recipe(method="smoothquant")), {SCHEMES["W4A16"]}, recipe)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (Recipe(method="auto", scale_rule="mse"), ("--scale-rule", "leave it out")),
        (Recipe(method="auto", options={"gptq": {"damp": 1.0}}), ("options", "auto tries every method")),
        (Recipe(method="awq,auto"), ("awq,auto", "auto alone")),
        (Recipe(method="gptq", options={"gptq": 5}), ("options: gptq", "no mapping")),
        (Recipe(method="gptq", options={"gptq": {"damp": "abc"}}), ("damp", "'abc'", "float")),
        (Recipe(method="gptq", options={"gptq": {"damp": float("nan")}}), ("damp", "nan")),
        (Recipe(method="gptq", options={"gptq": {"damp": -1}}), ("damp", "-1")),
        (Recipe(method="gptq", options={"gptq": {"act_order": "no"}}), ("act_order", "bool")),
        (Recipe(options={"rtn": {"scale_rule": 5}}), ("scale_rule", "5")),
        (Recipe(options={"rtn": {"scale_rule": "msee"}}), ("scale-rule msee",)),
    ],
)
def test_settings_are_checked_before_any_work(recipe: Recipe, words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        chain(recipe)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_sparse_scheme_brings_a_sparsifier_and_that_a_rounding() -> None:
    found = chain(Recipe(scheme="SPARSE50_W4A16"))
    assert found.label(SCHEMES["SPARSE50_W4A16"]) == "sparsegpt,gptq"
    assert (found.label(SCHEMES["SPARSE50"]), found.label(SCHEMES["W8A16"])) == ("sparsegpt", "gptq")
    assert chain(Recipe(scheme="SPARSE50", method="magnitude")).rounding.name == "rtn"
    named = chain(Recipe(scheme="SPARSE50_W4A16", method="sparsegpt,gptq"))
    assert (found.options["act_order"], named.options["act_order"]) == (False, True)
    both = chain(Recipe(scheme="SPARSE50_W4A16", method="awq,sparsegpt"))
    assert (both.label(SCHEMES["SPARSE50_W4A16"]), both.options["act_order"]) == ("awq,sparsegpt,gptq", False)
    assert found.pick(SCHEMES["W8A16"]).pruning is None and found.pick(SCHEMES["SPARSE50"], 0.4).ratio == 0.4


def test_magnitude_needs_no_text_until_something_is_fitted_or_measured() -> None:
    magnitude, schemes = {"scheme": "SPARSE50", "method": "magnitude"}, {SCHEMES["SPARSE50"]}
    assert fields_wanted(chain(Recipe(**magnitude)), schemes) == frozenset()
    assert fields_wanted(chain(Recipe(**magnitude, refit=True)), schemes) == {"second_moment"}
    assert fields_wanted(chain(Recipe(**magnitude, allocate="owl")), schemes) == {"second_moment"}


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (Recipe(scheme="SPARSE50", method="rtn"), ("--method", "prunes nothing", "wanda")),
        (Recipe(method="wanda"), ("--method wanda", "no scheme of this recipe is sparse")),
        (Recipe(scheme="SPARSE50", method="awq,wanda"), ("--method awq", "not rounded")),
        (Recipe(scheme="SPARSE50_W4A16", method="wanda,hqq"), ("--method hqq", "does not fit")),
        (Recipe(scheme="SPARSE50", pattern="2:4", allocate="owl"), ("--allocate owl", "--pattern")),
        (Recipe(scheme="SPARSE50", method="wanda,magnitude"), ("two sparsifiers",)),
        (Recipe(scheme="SPARSE50", method="wanda,wanda"), ("twice",)),
        (Recipe(method="hadamard,hadamard"), ("twice",)),
        (Recipe(scheme="SPARSE50", method="gptq"), ("--method gptq", "prunes nothing")),
        (Recipe(scheme="W4A16", lm_head="SPARSE50"), ("--lm-head SPARSE50: needs a --method that prunes, not rtn",)),
        (Recipe(scheme="SPARSE50", method="wanda,rtn"), ("--method rtn", "rounds no weights")),
        (Recipe(scheme="SPARSE50", scale_rule="mse"), ("--scale-rule mse", "rounds no weights")),
        (Recipe(scheme="SPARSE50", symmetric=True), ("--sym", "rounds no weights")),
        (Recipe(scheme="SPARSE50", method="gptq,sparsegpt"), ("gptq rounds", "last")),
        (Recipe(scheme="SPARSE50", method="hadamard,wanda"), ("hadamard", "leave hadamard or wanda out")),
        (Recipe(scheme="SPARSE50_W4A16", method="wanda,hadamard,rtn"), ("leave hadamard or wanda out",)),
        (Recipe(scheme="SPARSE50_W4A16", method="wanda,awq,rtn"), ("wanda", "put awq first")),
        (Recipe(scheme="SPARSE50", method="hadamard"), ("--method hadamard: prunes nothing",)),
        (Recipe(scheme="SPARSE50", method="auto"), ("--method auto: prunes nothing",)),
        (Recipe(scheme="SPARSE50", allocate="owls"), ("--allocate owls", "did you mean 'owl'")),
        (Recipe(refit=True), ("--refit", "nothing is pruned; leave it out, or use a sparse scheme")),
        (Recipe(scheme="SPARSE50", method="auto", allocate="owl"), ("--allocate owl", "nothing is pruned")),
        (Recipe(scheme="SPARSE50", options={"sparsegpt": {"damp": "a"}}), ("sparsegpt: damp", "float")),
    ],
)
def test_mistakes_about_pruning_are_named(recipe: Recipe, words: tuple[str, ...]) -> None:
    head = set() if recipe.lm_head is None else {SCHEMES[recipe.lm_head]}
    with pytest.raises(InputError) as caught:
        check_fit(chain(recipe), {recipe.base_scheme()[0], *head}, recipe)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_whole_numbers_do_for_real_settings() -> None:
    assert chain(Recipe(method="gptq", options={"gptq": {"damp": 1}})).options["damp"] == 1


def test_a_rotation_goes_between_transforms_and_rounding() -> None:
    found = chain(Recipe(method="awq,hadamard,gptq", options={"hadamard": {"block": 64}}))
    assert found.label(SCHEMES["W4A16"]) == "awq,hadamard,gptq" and [row.name for row, _ in found.transforms] == ["awq"]
    fitted = found.fitted(SCHEMES["W4A16"], 576)
    assert fitted.rotation == 64 and replace(fitted, rotation=None) == SCHEMES["W4A16"]
    assert chain(Recipe(method="gptq")).fitted(SCHEMES["W4A16"], 576) == SCHEMES["W4A16"]
    assert chain(Recipe(method="hadamard")).rounding.name == "rtn"
    assert fields_wanted(chain(Recipe(method="hadamard")), {SCHEMES["W4A16"]}) == frozenset()


def test_the_documentation_has_every_setting_and_its_default() -> None:
    text = (Path(__file__).parents[3] / "docs" / "methods.md").read_text(encoding="utf-8")
    table = text[text.index("| method | settings") :].split("\n\n")[0]
    rows = {line.split("`")[1]: line for line in table.splitlines() if line.startswith("| `")}
    methods = [*TRANSFORMS.values(), *ROTATIONS.values(), *SPARSIFIERS.values(), *ROUNDINGS.values()]
    assert set(rows) == {method.name for method in methods if method.options}
    for method in methods:
        for name, default in method.options.items():
            assert f"`{name}: {str(default).lower()}`" in rows[method.name]


def test_the_documentation_has_every_key_of_a_recipe() -> None:
    text = (Path(__file__).parents[3] / "docs" / "methods.md").read_text(encoding="utf-8")
    section = text[text.index("## Recipe files") : text.index("| method | settings")]
    assert [item.name for item in fields(Recipe) if f"`{item.name}`" not in section] == []
