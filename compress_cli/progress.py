"""Two ways to show how far a loop is: bars that redraw themselves on a terminal, plain lines everywhere else.

Both are a `Track` (formats/progress.py). Loops may nest: on a terminal the inner one is a bar below the outer one that
goes away when done; in plain lines it only speaks when nothing else has for a while, so a log stays short.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from .units import time_text

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")
SECONDS_BETWEEN_LINES = 2.0


class Lines:
    """Writes `label  37 %  9/24  0:41 elapsed, 1:10 left` at most every couple of seconds, and once at the end."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._depth = 0
        self._spoke = clock()

    def __call__(self, items: Iterable[T], label: str, total: int) -> Iterator[T]:
        """The `Track`."""
        begun = self._clock()
        if self._depth == 0:
            self._spoke = begun
        self._depth += 1
        done = 0
        try:
            for item in items:
                yield item
                done += 1
                if done < total and self._clock() - self._spoke >= SECONDS_BETWEEN_LINES:
                    self._tell(label, done, total, self._clock() - begun)
        finally:
            self._depth -= 1
        if self._depth == 0:
            self._write(f"{label}  100 %  {done}/{done}  {time_text(self._clock() - begun)} elapsed")

    def _tell(self, label: str, done: int, total: int, elapsed: float) -> None:
        left = time_text(elapsed / done * (total - done))
        self._write(f"{label}  {100 * done // total:3d} %  {done}/{total}  {time_text(elapsed)} elapsed, {left} left")
        self._spoke = self._clock()

    def close(self) -> None:
        """Nothing stays open between two lines."""


class Bars:
    """Bars on stderr with count, percentage, elapsed time and ETA, drawn by rich."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._open = 0

    def __call__(self, items: Iterable[T], label: str, total: int) -> Iterator[T]:
        """The `Track`."""
        if self._progress is None:
            self._progress = _new_progress()
            self._progress.start()
        progress, inner = self._progress, self._open > 0
        task = progress.add_task(label, total=total)
        self._open += 1
        try:
            for item in items:
                yield item
                progress.advance(task)
        finally:
            self._open -= 1
            if inner:
                progress.remove_task(task)
            else:
                self.close()

    def close(self) -> None:
        """Stop drawing and leave the cursor below the bars; the next loop starts anew."""
        if self._progress is not None:
            self._progress.stop()
        self._progress, self._open = None, 0


def _new_progress() -> Progress:
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("ETA"),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        redirect_stdout=False,
    )
