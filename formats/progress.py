"""How long loops tell the outside how far they are, without knowing who listens.

Layers below the command line take a `Track` and wrap their loops in it; the command line passes one that draws a bar
or prints lines, the Python API and the tests pass `silent`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

T = TypeVar("T")


class Track(Protocol):
    """Yields the items of `items` unchanged and reports each as a finished step of `label`."""

    def __call__(self, items: Iterable[T], label: str, total: int) -> Iterator[T]: ...


def silent(items: Iterable[T], label: str, total: int) -> Iterator[T]:
    """The `Track` that reports nothing."""
    del label, total
    yield from items
