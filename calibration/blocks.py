"""A part of the model with its weights in place, and looking at what its linears are handed while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .lanes import Stage

Look = Callable[[Tensor], object]


@dataclass
class Block:
    """A part of the model with its weights in place: a decoder block, or the final norm with the head.

    `linears` maps checkpoint names to modules; `stages` groups them by the input they share, in the order they run;
    `run` maps hidden states and the model's keyword arguments to hidden states.
    """

    module: nn.Module
    linears: dict[str, nn.Module]
    stages: list[Stage]
    run: Callable[..., Tensor]


def layer_runner(module: nn.Module, number: int) -> Callable[..., Tensor]:
    """`Block.run` of decoder block `number`, which is given the arguments of all of them."""

    def run(hidden: Tensor, arguments: list[dict[str, Any]]) -> Tensor:
        result = module(hidden, **arguments[number])
        return result[0] if isinstance(result, tuple) else result

    return run


@contextmanager
def watched(linears: Mapping[str, nn.Module], looks: Mapping[str, Look]) -> Iterator[None]:
    """While inside, the linears named in `looks` show their input to it before they run."""

    def shown(look: Look) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            look(args[0])

        return hook

    hooks = [linears[name].register_forward_pre_hook(shown(look)) for name, look in looks.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def stages_of(linears: Mapping[str, nn.Module], run: Callable[[], object]) -> list[Stage]:
    """Names of the linears that `run` reaches, in order; neighbours that are handed the same tensor form a stage."""
    seen: list[tuple[str, Tensor]] = []

    def note(name: str) -> Look:
        return lambda x: seen.append((name, x))

    with watched(linears, {name: note(name) for name in linears}):
        run()
    stages: list[Stage] = []
    for number, (name, x) in enumerate(seen):
        if number and x is seen[number - 1][1]:
            stages[-1] += (name,)
        else:
            stages.append((name,))
    return stages
