"""What runs packed weights: reference decoders, fast kernels, the packed modules and `load`.

Nothing is imported here. With a checkout as the working directory this folder answers to the bare name `kernels`, which
is also a package of the Hub that transformers looks for whenever it is imported. `__version__` makes every transformers
see a release too old to use; where the Hub package is installed behind this folder, it is handed over on first use.
"""

__version__ = "0"


def __getattr__(name: str) -> object:
    """`name` of the Hub package, where this folder stands in front of it. Raises AttributeError for anything else."""
    if __name__ == "kernels" and not name.startswith("__"):
        import sys
        from importlib.machinery import PathFinder
        from importlib.util import module_from_spec
        from pathlib import Path

        here = Path(__file__).resolve().parent.parent
        spec = PathFinder.find_spec("kernels", [place for place in sys.path if Path(place).resolve() != here])
        if spec is not None and spec.loader is not None:
            hub = sys.modules["kernels"] = module_from_spec(spec)
            spec.loader.exec_module(hub)
            return getattr(hub, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
