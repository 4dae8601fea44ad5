"""Running a block once while its linears change on the way: every batch stops where the next group of linears begins.

A method such as GPTQ wants the inputs of `o_proj` as they are with q, k and v already quantised. Running the block
again for each group costs a forward pass a group. Here each batch runs on a thread of its own, one at a time; when it
reaches a linear of a group that is not done, it waits there; when all batches wait at the same place, the group's
inputs are all known, the group is rounded, and the batches go on with the new weights. One forward pass in all, and
what is held is one input a token, not the temporaries of the block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Stage = tuple[str, ...]


class LaneError(RuntimeError):
    """The batches of a block did not reach its linears in the same order: the block cannot be run in stages."""


class _Abandoned(BaseException):
    """Unwinds a waiting batch when another one failed; never leaves this module."""


@dataclass
class _Lane:
    """One batch's run through the block."""

    work: Callable[[], Tensor]
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    waiting: tuple[int, Tensor] | None = None
    result: Tensor | None = None
    error: BaseException | None = None


class StagedRun:
    """Runs `works` (one call a batch) and stops each at the first linear of every stage.

    `stages` are groups of linear names that share one input, in the order the block reaches them; `linears` the
    modules. `on_stage(number, inputs)` is called once a stage with the input of every batch and may replace the
    modules' weights.
    """

    def __init__(
        self,
        linears: dict[str, nn.Module],
        stages: Sequence[Stage],
        on_stage: Callable[[int, list[Tensor]], None],
    ) -> None:
        self._linears, self._stages, self._on_stage = linears, stages, on_stage
        self._stage_of = {name: number for number, stage in enumerate(stages) for name in stage}
        self._done = 0
        self._back = threading.Semaphore(0)
        self._abandon = False
        self._current: _Lane | None = None

    def run(self, works: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        """The result of every batch. Raises what a batch or `on_stage` raised, LaneError for uneven batches."""
        lanes = [_Lane(work) for work in works]
        grad = torch.is_grad_enabled()
        threads = [threading.Thread(target=self._follow, args=(lane, grad), daemon=True) for lane in lanes]
        hooks = [
            module.register_forward_pre_hook(self._gate(self._stage_of[name]))
            for name, module in self._linears.items()
            if name in self._stage_of
        ]
        for thread in threads:
            thread.start()
        try:
            for number in range(len(self._stages)):
                self._advance(lanes, number)
            self._advance(lanes, None)
        finally:
            self._abandon = True
            for lane in lanes:
                lane.turn.release()
            for thread in threads:
                thread.join()
            for hook in hooks:
                hook.remove()
        return [lane.result for lane in lanes if lane.result is not None]

    def _advance(self, lanes: Sequence[_Lane], number: int | None) -> None:
        """Let every batch run on to stage `number` (None: to the end), then hand its inputs over."""
        for lane in lanes:
            lane.waiting = None
            self._current = lane
            lane.turn.release()
            self._back.acquire()
            if lane.error is not None:
                raise lane.error
            place = lane.waiting[0] if lane.waiting is not None else None
            if place != number:
                raise LaneError(f"a batch stopped at stage {place} where stage {number} was expected")
        if number is None:
            return
        self._on_stage(number, [lane.waiting[1] for lane in lanes if lane.waiting is not None])
        self._done = number + 1

    def _follow(self, lane: _Lane, grad: bool) -> None:
        lane.turn.acquire()
        if self._abandon:
            return
        try:
            with torch.set_grad_enabled(grad):
                lane.result = lane.work()
        except _Abandoned:
            return
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits, which raises it
            lane.error = error
        self._back.release()

    def _gate(self, number: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def stop(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            lane = self._current
            if number < self._done or lane is None:
                return
            lane.waiting = (number, args[0])
            self._back.release()
            lane.turn.acquire()
            if self._abandon:
                raise _Abandoned

        return stop
