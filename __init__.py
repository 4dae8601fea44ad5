"""compress: make language models small, prove what it cost, and serve the result.

The Python API is what the commands run: `quantize` with its `Recipe`, `verify`, `evaluate`, `inspect` and `load`. Each
is imported when it is first asked for. Nothing is imported here, because test runners and tools import this file on its
own, as the `__init__.py` of a checkout whose folder may have any name.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .compress_cli.runs.evaluate import evaluate
    from .compress_cli.runs.inspect import inspect
    from .compress_cli.runs.quantize import quantize
    from .compress_cli.runs.recipe import Recipe
    from .compress_cli.runs.verify import verify
    from .kernels.load import load

__version__ = "0.1.0"
__all__ = ["Recipe", "__version__", "evaluate", "inspect", "load", "quantize", "verify"]

_HOMES = {
    "Recipe": ".compress_cli.runs.recipe",
    "evaluate": ".compress_cli.runs.evaluate",
    "inspect": ".compress_cli.runs.inspect",
    "load": ".kernels.load",
    "quantize": ".compress_cli.runs.quantize",
    "verify": ".compress_cli.runs.verify",
}


def __getattr__(name: str) -> object:
    """Import `name` from its home. Raises AttributeError for any other name."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
