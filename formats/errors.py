"""Errors that are the user's to fix: one sentence that names the key, the cause and the fix.

They live in the lowest layer so that every other one can raise them. The command line prints the sentence and exits
with `exit_code` (see docs/exit-codes.md); everything that is not one of these is a bug and exits with 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


class CompressError(Exception):
    """Base of every error this package raises on purpose.

    `key` is what the user wrote or pointed at (a flag, a file, a tensor), `cause` what is wrong with it, `fix` what
    would make it right. `str(error)` is one sentence.
    """

    exit_code = 2

    def __init__(self, key: str, cause: str, fix: str) -> None:
        super().__init__(key, cause, fix)
        self.key, self.cause, self.fix = key, cause, fix

    def __str__(self) -> str:
        cause = " ".join(self.cause.split())  # what other libraries say may have lines
        return f"{self.key}: {cause}; {self.fix}."


class InputError(CompressError):
    """A usage or input error: nothing was written (exit 2)."""


class GateFailed(CompressError):
    """A gate said no: a regression or a failed verification (exit 1)."""

    exit_code = 1


class StoppedEarly(CompressError):
    """Interrupted, out of memory or out of disk; what was finished is kept for `--resume` (exit 3)."""

    exit_code = 3


@contextmanager
def inside(name: str) -> Iterator[None]:
    """Let an InputError that names a suffix name the tensor: put `name`, that of the linear, before its key."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{name}.{error.key}", error.cause, error.fix) from error


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean 'X'` for the closest known word, else the list of known words."""
    names = list(known)
    by_fold = {name.casefold(): name for name in names}
    close = get_close_matches(word.casefold(), list(by_fold), n=1, cutoff=0.5)
    if close:
        return f"did you mean '{by_fold[close[0]]}'"
    return "use one of " + ", ".join(names)
