"""Progress: rare plain lines with percentage and ETA, bars that nest and never outlive their loop."""

from __future__ import annotations

import io
from itertools import pairwise

import pytest
import rich.console

from compress_llm.compress_cli import progress
from compress_llm.compress_cli.progress import Bars, Lines


class Clock:
    """A clock that moves when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def walk(track: Lines | Bars, clock: Clock, count: int, seconds: float, label: str = "blocks") -> list[int]:
    seen = []
    for item in track(range(count), label, count):
        clock.now += seconds
        seen.append(item)
    return seen


def test_items_come_through_unchanged(clock: Clock) -> None:
    assert walk(Lines([].append, clock), clock, 4, 1) == [0, 1, 2, 3]


def test_lines_tell_share_count_and_time_left(clock: Clock) -> None:
    lines: list[str] = []
    walk(Lines(lines.append, clock), clock, 4, 30)
    assert lines == [
        "blocks   25 %  1/4  0:30 elapsed, 1:30 left",
        "blocks   50 %  2/4  1:00 elapsed, 1:00 left",
        "blocks   75 %  3/4  1:30 elapsed, 0:30 left",
        "blocks  100 %  4/4  2:00 elapsed",
    ]


def test_lines_are_seconds_apart(clock: Clock) -> None:
    lines: list[str] = []
    walk(Lines(lines.append, clock), clock, 1000, 0.01)
    assert len(lines) == 5


def test_inner_loops_speak_only_when_nothing_else_has(clock: Clock) -> None:
    lines: list[tuple[float, str]] = []
    track = Lines(lambda line: lines.append((clock.now, line)), clock)
    for _ in track(range(3), "outer", 3):
        walk(track, clock, 10, 0.5, "inner")
    *during, (_, last) = lines
    assert last == "outer  100 %  3/3  0:15 elapsed"
    assert {line.split()[0] for _, line in during} == {"inner", "outer"}
    moments = [moment for moment, _ in during]
    assert min(later - earlier for earlier, later in pairwise(moments)) >= 2


def test_a_loop_left_early_ends_its_nesting(clock: Clock) -> None:
    lines: list[str] = []
    track = Lines(lines.append, clock)
    loop = track(range(3), "left", 3)
    next(loop)
    loop.close()
    walk(track, clock, 1, 1, "next")
    assert lines == ["next  100 %  1/1  0:01 elapsed"]


def test_an_empty_loop(clock: Clock) -> None:
    assert walk(Lines([].append, clock), clock, 0, 1) == []


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    out = io.StringIO()
    real = rich.console.Console
    monkeypatch.setattr(rich.console, "Console", lambda stderr: real(file=out, force_terminal=stderr, width=100))
    return out


def test_bars_nest_and_go_away(screen: io.StringIO, clock: Clock) -> None:
    bars = Bars()
    for _ in bars(range(2), "outer", 2):
        assert walk(bars, clock, 3, 0, "inner") == [0, 1, 2]
        assert bars._progress is not None
        assert [task.description for task in bars._progress.tasks] == ["outer"]
    assert bars._progress is None
    assert "outer" in screen.getvalue()
    assert "2/2" in screen.getvalue()


def test_closing_stops_a_bar_that_an_error_left(screen: io.StringIO) -> None:
    bars = Bars()
    loop = bars(range(2), "outer", 2)
    next(loop)
    drawing = bars._progress
    assert drawing is not None
    assert drawing.live.is_started
    bars.close()
    assert not drawing.live.is_started
    loop.close()
    bars.close()


def test_a_couple_of_seconds() -> None:
    assert 1 <= progress.SECONDS_BETWEEN_LINES <= 5
