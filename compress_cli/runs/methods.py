"""From a recipe's method names to functions with their settings: transforms, rotation or sparsifier, rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from ...calibration.statistics import Field
from ...formats.errors import InputError, nearest
from ...formats.layout import has_input_scale
from ...formats.scheme import Scheme
from ...quantizers.method import Rotation, Rounding, Transformation
from ...quantizers.registry import ROTATIONS, ROUNDINGS, TRANSFORMS
from ...quantizers.scales import check_rule, resolve
from ...sparsifiers.allocate import RULES
from ...sparsifiers.method import Sparsifier
from ...sparsifiers.pruning import Pruning
from ...sparsifiers.registry import SPARSIFIERS
from .recipe import Recipe

AUTO = "auto"
METHODS = (*TRANSFORMS, *ROTATIONS, *SPARSIFIERS, *ROUNDINGS)
Method = Rounding | Transformation | Rotation | Sparsifier


@dataclass(frozen=True)
class Pick:
    """How one linear is pruned or rounded: `label` as the report names it, `details` what it says of the choice.

    `ratio` is the linear's own share of dropped weights, None for the scheme's.
    """

    label: str
    rounding: Rounding
    options: Mapping[str, Any]
    details: dict[str, Any] = field(default_factory=dict)
    pruning: Pruning | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class Chain:
    """The transforms in order, the rotation or None, the pruning or None, and the rounding, each with its settings.

    `allocate` names the rule by which sparse linears get ratios of their own, None for the same everywhere.
    """

    transforms: tuple[tuple[Transformation, Mapping[str, Any]], ...]
    rounding: Rounding
    options: Mapping[str, Any]
    rotation: tuple[Rotation, Mapping[str, Any]] | None = None
    auto: bool = False
    pruning: Pruning | None = None
    allocate: str | None = None

    @property
    def transform_fields(self) -> frozenset[Field]:
        """Statistics that the transforms look at; `auto` may try any of them."""
        if self.auto:
            return frozenset({"second_moment", "abs_max", "sample"})
        return frozenset().union(*(transform.needs for transform, _ in self.transforms))

    @property
    def rounding_fields(self) -> frozenset[Field]:
        """Statistics that the pruning and the rounding look at."""
        pruned: frozenset[Field] = frozenset() if self.pruning is None else self.pruning.needs
        return self.rounding.fields(self.options) | pruned

    @property
    def all(self) -> tuple[Transformation | Rotation | Rounding, ...]:
        """Every method but the pruning, in the order they are applied."""
        turn = () if self.rotation is None else (self.rotation[0],)
        return (*(transform for transform, _ in self.transforms), *turn, self.rounding)

    def fitted(self, scheme: Scheme, in_features: int) -> Scheme:
        """`scheme` as a linear of so many inputs gets it: rotated, where the chain says so. Raises InputError."""
        if self.rotation is None:
            return scheme
        rotation, options = self.rotation
        return replace(scheme, rotation=rotation.block(scheme, in_features, options))

    def label(self, scheme: Scheme) -> str:
        """The names of what a linear of `scheme` goes through, joined as on the command line."""
        if self.auto:
            return AUTO
        names = [method.name for method in self.all[:-1]]
        if self.pruning is not None and scheme.sparsity is not None:
            names.append(self.pruning.sparsifier.name)
        return ",".join(names + [self.rounding.name] * scheme.rounds)

    def pick(self, scheme: Scheme, ratio: float | None = None) -> Pick:
        """What happens to a linear of `scheme`, which drops `ratio` of its weights (None: what the scheme says)."""
        pruning = self.pruning if scheme.sparsity is not None else None
        return Pick(self.label(scheme), self.rounding, self.options, pruning=pruning, ratio=ratio)


def chain(recipe: Recipe) -> Chain:
    """Look the recipe's methods up. Raises InputError for unknown names, a wrong order, unknown settings."""
    if AUTO in recipe.methods:
        return _auto(recipe)
    names = _checked_names(recipe)
    pruning = _pruning(recipe, names)
    changes = [name for name in names if name not in ROUNDINGS]
    if names[-1] in ROUNDINGS:
        rounding, defaults = ROUNDINGS[names[-1]], {}
    else:
        last = {**TRANSFORMS, **ROTATIONS, **SPARSIFIERS}[changes[-1]]
        rounding, defaults = ROUNDINGS[last.rounding], dict(last.rounding_options)
    given = {**_given(recipe, rounding.name), **_rule(recipe, rounding)}
    turn = ROTATIONS.get(changes[-1]) if changes else None
    return Chain(
        tuple(
            (TRANSFORMS[name], _settings(TRANSFORMS[name], rounding, recipe)) for name in changes if name in TRANSFORMS
        ),
        rounding,
        _filled(rounding, given, defaults),
        None if turn is None else (turn, _filled(turn, _given(recipe, turn.name), {})),
        pruning=pruning,
        allocate=recipe.allocate,
    )


def _pruning(recipe: Recipe, names: tuple[str, ...]) -> Pruning | None:
    """The sparsifier among `names` with its settings. Raises InputError for flags that only pruning has."""
    found = [name for name in names if name in SPARSIFIERS]
    if not found:
        sparse = recipe.base_scheme()[0].sparsity is not None
        fix = "leave it out, or " + ("name one of " + ", ".join(SPARSIFIERS) if sparse else "use a sparse scheme")
        for flag, given in (("--refit", recipe.refit), (f"--allocate {recipe.allocate}", recipe.allocate)):
            if given:
                raise InputError(flag, "nothing is pruned", fix)
        return None
    if len(found) > 1:
        raise InputError(f"--method {recipe.method}", "names two sparsifiers", "name one")
    if recipe.allocate is not None and recipe.allocate not in RULES:
        raise InputError(f"--allocate {recipe.allocate}", "no rule has this name", nearest(recipe.allocate, RULES))
    sparsifier = SPARSIFIERS[found[0]]
    return Pruning(sparsifier, _filled(sparsifier, _given(recipe, sparsifier.name), {}), recipe.refit)


def _auto(recipe: Recipe) -> Chain:
    if recipe.methods != (AUTO,):
        raise InputError(f"--method {recipe.method}", f"{AUTO} tries the methods itself", f"write {AUTO} alone")
    _pruning(recipe, ())
    if recipe.options or recipe.scale_rule is not None:
        given = "--scale-rule" if recipe.scale_rule is not None else "options"
        raise InputError(given, f"{AUTO} tries every method with its own settings", "leave it out, or name a method")
    return Chain((), ROUNDINGS["rtn"], ROUNDINGS["rtn"].options, auto=True)


def _rule(recipe: Recipe, rounding: Rounding) -> dict[str, Any]:
    if recipe.scale_rule is None:
        return {}
    if "scale_rule" not in rounding.options:
        raise InputError("--scale-rule", f"{rounding.name} has no choice of scales", "leave it out")
    return {"scale_rule": check_rule(recipe.scale_rule)}


def _checked_names(recipe: Recipe) -> tuple[str, ...]:
    names = recipe.methods
    if not names:
        raise InputError("--method", "names no method", "use one of " + ", ".join(METHODS))
    for name in names:
        if name not in METHODS:
            raise InputError(f"--method {name}", "no method has this name", nearest(name, [AUTO, *METHODS]))
    _check_order(names, f"--method {recipe.method}")
    for name in recipe.options:
        if name not in names:
            raise InputError(f"options: {name}", "is not a method of this recipe", nearest(str(name), names))
    return names


def _check_order(names: tuple[str, ...], flag: str) -> None:
    if len(set(names)) != len(names):
        raise InputError(flag, "names a method twice", "name each once")
    turns, prunes = ([name for name in names if name in table] for table in (ROTATIONS, SPARSIFIERS))
    if turns and prunes:
        cause = f"{turns[0]} changes the basis that {prunes[0]} drops weights in, and sparse linears run in their own"
        raise InputError(flag, cause, f"leave {turns[0]} or {prunes[0]} out")
    for name, then in pairwise(names):
        if name in ROUNDINGS:
            raise InputError(flag, f"{name} rounds and must come last", "put transforms first")
        if name in SPARSIFIERS and then in TRANSFORMS:
            raise InputError(flag, f"{name} chooses among weights that {then} rescales", f"put {then} first")
        if name in ROTATIONS and then not in ROUNDINGS:
            raise InputError(flag, f"{name} changes the basis that {then} works in", f"put {then} first")


def _settings(transform: Transformation, then: Rounding, recipe: Recipe) -> Mapping[str, Any]:
    """The transform's settings; what the rounding after it hints at gives way to what the recipe says."""
    given = _given(recipe, transform.name)
    _filled(transform, given, {})
    return transform.settings(then, given)


def _filled(method: Method, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    for key, value in given.items():
        name = f"options: {method.name}: {key}"
        if key not in method.options:
            raise InputError(name, "no setting has this name", nearest(str(key), method.options))
        if not _is_like(value, method.options[key]):
            wanted = type(method.options[key]).__name__
            like = f"give one like its default, {method.options[key]!r}"
            fix = f"{like}; numbers are not negative, and to YAML 1e-2 is text"
            raise InputError(name, f"{value!r} is not a valid {wanted}", fix)
        if key == "scale_rule":
            check_rule(value)
    return {**method.options, **defaults, **given}


def _given(recipe: Recipe, method: str) -> Mapping[str, Any]:
    given = recipe.options.get(method, {})
    if not isinstance(given, Mapping):
        raise InputError(f"options: {method}", f"{given!r} is no mapping", "write 'setting: value' pairs")
    return given


def _is_like(value: object, default: object) -> bool:
    """Whether a setting has the type of its default; numbers must be finite and not negative."""
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, (int, float)):
        right = isinstance(value, (int, float)) and (isinstance(default, float) or isinstance(value, int))
        return right and math.isfinite(value) and value >= 0  # type: ignore[arg-type]
    return isinstance(value, type(default))


def check_fit(methods: Chain, schemes: set[Scheme], recipe: Recipe) -> None:
    """Raise InputError when a method of the chain, or its scale rule, does not work on one of the schemes."""
    _check_pruning(methods, schemes, recipe)
    if schemes and not any(scheme.rounds for scheme in schemes):
        _check_unrounded(recipe)
    for scheme in schemes if "scale_rule" in methods.options else ():
        if scheme.rounds:
            resolve(methods.options["scale_rule"], scheme)
    for method in methods.all:
        for scheme in schemes:
            if not scheme.rounds and method is methods.rounding:
                continue
            reason = method.misfit(scheme) if scheme.rounds else "its weights are not rounded"
            if scheme.sparsity is not None and isinstance(method, Rounding) and method.masked is None:
                reason = "it does not round what pruning leaves"
            if reason:
                raise InputError(f"--method {method.name}", f"does not fit {scheme.name}: {reason}", "choose another")


def _check_unrounded(recipe: Recipe) -> None:
    """Raise InputError for what only rounding has, where no scheme of the recipe rounds."""
    asked = [f"--method {name}" for name in recipe.methods if name in ROUNDINGS]
    asked += [f"--scale-rule {recipe.scale_rule}"] if recipe.scale_rule is not None else []
    for flag in asked:
        raise InputError(flag, f"scheme {recipe.scheme} rounds no weights", "leave it out")


def _check_pruning(methods: Chain, schemes: set[Scheme], recipe: Recipe) -> None:
    sparse = [scheme for scheme in schemes if scheme.sparsity is not None]
    if sparse and methods.pruning is None:
        fix = "name one of " + ", ".join(SPARSIFIERS)
        name = sparse[0].name
        if recipe.method is None:  # the default of another scheme: what the user wrote is this one
            flag = "--lm-head" if recipe.lm_head == name else "rules: scheme"
            raise InputError(f"{flag} {name}", f"needs a --method that prunes, not {','.join(recipe.methods)}", fix)
        raise InputError(f"--method {','.join(recipe.methods)}", f"prunes nothing, as {name} asks for", fix)
    if methods.pruning is not None and not sparse:
        cause = "prunes, and no scheme of this recipe is sparse"
        raise InputError(f"--method {methods.pruning.sparsifier.name}", cause, "use a sparse scheme")
    if methods.allocate is not None and any(scheme.sparsity and scheme.sparsity.group for scheme in sparse):
        cause = "a pattern drops the same everywhere"
        raise InputError(f"--allocate {methods.allocate}", cause, "leave it or --pattern out")


def fields_wanted(methods: Chain, schemes: set[Scheme]) -> frozenset[Field]:
    """Every statistic that the run needs; empty when nothing has to be calibrated."""
    static = any(has_input_scale(scheme) for scheme in schemes)
    extra: frozenset[Field] = frozenset({"abs_max"}) if static else frozenset()
    measured: frozenset[Field] = frozenset() if methods.allocate is None else frozenset({"second_moment"})
    rounds = any(scheme.rounds for scheme in schemes)
    pruned: frozenset[Field] = frozenset() if methods.pruning is None else methods.pruning.needs
    return methods.transform_fields | (methods.rounding_fields if rounds else pruned) | measured | extra
