"""Options that several commands share, so that a flag means the same everywhere.

Flags are kebab-case; the snake_case spelling of each (`--group_size`) is taken too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ..formats.errors import InputError
from .console import Console
from .exits import printing

F = TypeVar("F", bound=Callable[..., Any])


class Command(click.Command):
    """A command that takes both spellings of its flags, and `-h`."""

    def __init__(self, *args: Any, **attrs: Any) -> None:
        attrs["context_settings"] = {
            "token_normalize_func": kebab,
            "help_option_names": ["-h", "--help"],
            **(attrs.get("context_settings") or {}),
        }
        super().__init__(*args, **attrs)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does, which prints `--help` here."""
        with printing():
            return super().parse_args(ctx, args)


class Place(click.Path):
    """A path that has a name: an empty one, as an unset variable of a shell gives, is not the current directory."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path. Raises InputError for an empty one."""
        if value == "":
            flag = "path" if param is None else param.opts[-1]
            raise InputError(f"{flag} ''", "is empty", "name a path")
        return super().convert(value, param, ctx)


def kebab(token: str) -> str:
    """`group_size` → `group-size`; click passes names of options and choices, never values."""
    return token.replace("_", "-")


def reporting(function: F) -> F:
    """Add `--json`, `--quiet` and `--verbose`, and call `function` with the `console` they ask for.

    Goes right above the function, so that these three end the list of options.
    """

    @click.option("--json", "as_json", is_flag=True, help="Print the report as JSON on stdout, and nothing else there.")
    @click.option("--quiet", "-q", is_flag=True, help="No progress and no notes; results, warnings and errors only.")
    @click.option("--verbose", "-v", is_flag=True, help="Say more about what is being done.")
    @click.pass_context
    @functools.wraps(function)
    def with_console(ctx: click.Context, /, *args: Any, as_json: bool, quiet: bool, verbose: bool, **rest: Any) -> Any:
        if quiet and verbose:
            raise click.UsageError("--quiet and --verbose exclude each other; leave one out.")
        return function(*args, console=ctx.with_resource(Console(as_json, quiet, verbose)), **rest)

    return with_console  # pyright: ignore[reportReturnType]


device = click.option(
    "--device",
    metavar="auto|cpu|cuda|cuda:N",
    default="auto",
    show_default=True,
    help="Where to compute; auto takes the first GPU, else the CPU.",
)
reference = click.option(
    "--reference", metavar="MODEL", help="The original: a directory, or the id of a model in the local Hub cache."
)
dataset = click.option(
    "--dataset",
    metavar="SOURCE",
    help="embedded, a .txt, .raw, .jsonl or .parquet file, or a directory saved by datasets.",
)


def _prefer(ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
    if value is not None:
        from ..kernels.registry import prefer

        ctx.with_resource(prefer(value))


kernel = click.option(
    "--kernel",
    metavar="NAME",
    expose_value=False,
    callback=_prefer,
    help="Run products by this implementation or fail; doctor lists them.  [default: $COMPRESS_KERNEL or the best]",
)
