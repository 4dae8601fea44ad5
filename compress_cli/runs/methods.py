"""From a recipe's method names to functions with their settings: transforms, maybe a rotation, then one rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ...calibration.statistics import Field
from ...formats.errors import InputError, nearest
from ...formats.layout import has_input_scale
from ...formats.scheme import Scheme
from ...quantizers.method import Rotation, Rounding, Transformation
from ...quantizers.registry import ROTATIONS, ROUNDINGS, TRANSFORMS
from ...quantizers.scales import check_rule, resolve
from .recipe import Recipe

AUTO = "auto"


@dataclass(frozen=True)
class Chain:
    """The transforms in order, the rotation and the rounding, each with its settings filled in."""

    transforms: tuple[tuple[Transformation, Mapping[str, Any]], ...]
    rounding: Rounding
    options: Mapping[str, Any]
    rotation: tuple[Rotation, Mapping[str, Any]] | None = None
    auto: bool = False

    @property
    def transform_fields(self) -> frozenset[Field]:
        """Statistics that the transforms look at; `auto` may try any of them."""
        if self.auto:
            return frozenset({"second_moment", "abs_max", "sample"})
        return frozenset().union(*(transform.needs for transform, _ in self.transforms))

    @property
    def rounding_fields(self) -> frozenset[Field]:
        """Statistics that the rounding looks at."""
        return self.rounding.fields(self.options)

    @property
    def all(self) -> tuple[Transformation | Rotation | Rounding, ...]:
        """Every method, in the order they are applied."""
        turn = () if self.rotation is None else (self.rotation[0],)
        return (*(transform for transform, _ in self.transforms), *turn, self.rounding)

    def fitted(self, scheme: Scheme, in_features: int) -> Scheme:
        """`scheme` as a linear of so many inputs gets it: rotated, where the chain says so. Raises InputError."""
        if self.rotation is None:
            return scheme
        rotation, options = self.rotation
        return replace(scheme, rotation=rotation.block(scheme, in_features, options))

    def label(self) -> str:
        """The names, joined as on the command line."""
        if self.auto:
            return AUTO
        return ",".join(method.name for method in self.all)


def chain(recipe: Recipe) -> Chain:
    """Look the recipe's methods up. Raises InputError for unknown names, a wrong order, unknown settings."""
    if AUTO in recipe.methods:
        return _auto(recipe)
    names = _checked_names(recipe)
    changes = [name for name in names if name not in ROUNDINGS]
    if names[-1] in ROUNDINGS:
        rounding, defaults = ROUNDINGS[names[-1]], {}
    else:
        last = TRANSFORMS.get(changes[-1]) or ROTATIONS[changes[-1]]
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
    )


def _auto(recipe: Recipe) -> Chain:
    if recipe.methods != (AUTO,):
        raise InputError(f"--method {recipe.method}", f"{AUTO} tries the methods itself", f"write {AUTO} alone")
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
    names, known = recipe.methods, [*TRANSFORMS, *ROTATIONS, *ROUNDINGS]
    if not names:
        raise InputError("--method", "names no method", "use one of " + ", ".join(known))
    for name in names:
        if name not in known:
            raise InputError(f"--method {name}", "no method has this name", nearest(name, [AUTO, *known]))
    flag = f"--method {recipe.method}"
    for name, then in pairwise(names):
        if name in ROUNDINGS:
            raise InputError(flag, f"{name} rounds and must come last", "put transforms first")
        if name in ROTATIONS and then not in ROUNDINGS:
            raise InputError(flag, f"{name} changes the basis that {then} works in", f"put {then} first")
    if len(set(names)) != len(names):
        raise InputError(flag, "names a transform twice", "name each once")
    for name in recipe.options:
        if name not in names:
            raise InputError(f"options: {name}", "is not a method of this recipe", nearest(str(name), names))
    return names


def _settings(transform: Transformation, then: Rounding, recipe: Recipe) -> Mapping[str, Any]:
    """The transform's settings; what the rounding after it hints at gives way to what the recipe says."""
    given = _given(recipe, transform.name)
    _filled(transform, given, {})
    return transform.settings(then, given)


def _filled(
    method: Rounding | Transformation | Rotation, given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Mapping[str, Any]:
    for key, value in given.items():
        name = f"options: {method.name}: {key}"
        if key not in method.options:
            raise InputError(name, "no setting has this name", nearest(str(key), method.options))
        if not _is_like(value, method.options[key]):
            wanted = type(method.options[key]).__name__
            raise InputError(name, f"{value!r} is not a valid {wanted}", "correct the value")
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


def check_fit(methods: Chain, schemes: set[Scheme]) -> None:
    """Raise InputError when a method of the chain, or its scale rule, does not work on one of the schemes."""
    for scheme in schemes if "scale_rule" in methods.options else ():
        resolve(methods.options["scale_rule"], scheme)
    for method in methods.all:
        for scheme in schemes:
            reason = method.misfit(scheme)
            if reason:
                raise InputError(f"--method {method.name}", f"does not fit {scheme.name}: {reason}", "choose another")


def fields_wanted(methods: Chain, schemes: set[Scheme]) -> frozenset[Field]:
    """Every statistic that the run needs; empty when nothing has to be calibrated."""
    static = any(has_input_scale(scheme) for scheme in schemes)
    extra: frozenset[Field] = frozenset({"abs_max"}) if static else frozenset()
    return methods.transform_fields | methods.rounding_fields | extra
