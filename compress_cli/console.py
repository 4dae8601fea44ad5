"""What a command says and where: results on stdout, everything else on stderr.

With `--json` stdout holds the report and nothing besides; tables are for people and are left out. With `--quiet` there
is no progress and no notes; results, warnings and errors stay. `--verbose` adds details.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Literal, TypeVar

import click

from ..formats.progress import silent
from .exits import printing
from .progress import Bars, Lines
from .runs.plain_json import to_json

T = TypeVar("T")
Side = Literal["left", "right"]
UNWRAPPED = 1000  # columns: as wide as any table gets, so that a file or a pipe receives whole lines


class Console:
    """One command's voice. A context manager: leaving it takes progress bars off the screen."""

    def __init__(self, as_json: bool = False, quiet: bool = False, verbose: bool = False) -> None:
        self.as_json, self.quiet, self.verbose = as_json, quiet, verbose
        on_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._progress = Bars() if on_terminal else Lines(_to_stderr)

    def __enter__(self) -> Console:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.close()

    def track(self, items: Iterable[T], label: str, total: int) -> Iterator[T]:
        """The `Track` to hand to a run."""
        return silent(items, label, total) if self.quiet else self._progress(items, label, total)

    def note(self, text: str) -> None:
        """Something a person may like to know, on stderr; gone with `--quiet`."""
        if not self.quiet:
            _to_stderr(text)

    def detail(self, text: str) -> None:
        """Something only `--verbose` shows, on stderr."""
        if self.verbose:
            _to_stderr(text)

    def warn(self, text: str) -> None:
        """Something that may make the result less than what was hoped for, on stderr, always."""
        _to_stderr(f"Warning: {text}")

    def result(self, report: object, show: Callable[[], None]) -> None:
        """The outcome: with `--json` the report (see `plain_json.plain`) on stdout, else what `show` prints."""
        with printing():
            if self.as_json:
                click.echo(to_json(report))
            else:
                show()

    def say(self, text: str) -> None:
        """A line of the outcome on stdout; nothing with `--json`."""
        if not self.as_json:
            click.echo(text)

    def table(self, columns: Mapping[str, Side], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
        """A table on stdout; nothing with `--json`. `columns` maps each heading to the side its cells lean to."""
        if self.as_json:
            return
        from rich import box
        from rich.console import Console as RichConsole
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
        for heading, side in columns.items():
            table.add_column(heading, justify=side, overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        RichConsole(width=None if sys.stdout.isatty() else UNWRAPPED).print(table)


def _to_stderr(text: str) -> None:
    click.echo(text, err=True)
