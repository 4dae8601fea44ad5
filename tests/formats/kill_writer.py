"""Run by test_writer.py: kills a writer in every state that the disk goes through. Prints the number of kills.

The process imports torch once and forks for every run. A child counts the lines it executes in the files under test
and kills itself with SIGKILL before a given one, so that nothing gets a chance to tidy up. Lines between which the
disk did not change leave the same behind, so one of them stands for all.
"""

import os
import shutil
import signal
import stat
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import FrameType

import torch

from compress_llm.formats.journal import Journal
from compress_llm.formats.replacing import old_path, recover, staging_path
from compress_llm.formats.writer import OutputDirectory

UNDER_TEST = ("writer.py", "journal.py", "container.py", "durable.py", "replacing.py", "shutil.py")
PARTS = {index: {f"t{index}": torch.arange(index, index + 9), f"u{index}": torch.ones(2)} for index in range(2)}


def job(out: Path, overwrite: bool, max_shard_bytes: int) -> None:
    """The way a run uses the writer: resume, skip what is there, write the rest, assemble, commit."""
    with OutputDirectory(out, overwrite, resume=True) as output:
        journal = Journal.open(output.staging, {"seed": 1}, resume=True)
        for index, tensors in PARTS.items():
            entry = journal.completed.get(index)
            if entry is None or not output.has_part(index, entry.hashes):
                journal.record(index, output.write_part(index, tensors), {"index": index})
        output.assemble(list(PARTS), max_shard_bytes)
        output.add_file("config.json", b"{}")
        output.commit()


def forked(action: Callable[[], None]) -> int:
    """Run `action` in a child; its wait status."""
    child = os.fork()
    if not child:
        code = 1
        try:
            action()
            code = 0
        finally:
            sys.settrace(None)
            os._exit(code)
    return os.waitpid(child, 0)[1]


def traced(action: Callable[[], None], each: Callable[[], None]) -> None:
    """Run `action` and call `each` before every line under test."""

    def tracer(frame: FrameType, event: str, _: object) -> Callable | None:
        if os.path.basename(frame.f_code.co_filename) not in UNDER_TEST:
            return None
        if event == "line":
            each()
        return tracer

    sys.settrace(tracer)
    action()
    sys.settrace(None)


def killing(at: int) -> Callable[[], None]:
    """Kills the process before its line number `at`."""
    passed = 0

    def each() -> None:
        nonlocal passed
        passed += 1
        if passed == at:
            os.kill(os.getpid(), signal.SIGKILL)

    return each


def content(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def state(room: Path) -> list[tuple[str, int, int]]:
    """What the disk holds below `room`: names, identities and sizes."""
    entries = [(str(path), path.lstat()) for path in sorted(room.rglob("*"))]
    return [(path, entry.st_ino, entry.st_size if stat.S_ISREG(entry.st_mode) else 0) for path, entry in entries]


def moments(action: Callable[[], None], room: Path) -> list[int]:
    """Numbers of the executed lines to kill at: each before which the disk differs from before the line before."""
    result = room.with_name("moments")

    def note() -> None:
        passed = 0
        numbers: list[int] = []
        last = None

        def each() -> None:
            nonlocal passed, last
            passed += 1
            now = state(room)
            if now != last:
                numbers.append(passed)
            last = now

        traced(action, each)
        result.write_text(" ".join(map(str, numbers)))

    if forked(note):
        raise SystemExit("the uninterrupted run failed")
    return [int(number) for number in result.read_text().split()]


def kill_everywhere(room: Path, overwrite: bool, max_shard_bytes: int) -> int:
    """Kill and resume at every moment, in the new folder `room`; the number of kills."""
    room.mkdir()
    out = room / "out"

    def prepare() -> dict[str, str] | None:
        for path in (out, staging_path(out), old_path(out)):
            shutil.rmtree(path, ignore_errors=True)
        if not overwrite:
            return None
        out.mkdir()
        (out / "config.json").write_text('{"old": 1}')
        return content(out)

    def run() -> None:
        job(out, overwrite, max_shard_bytes)

    prepare()
    numbers = moments(run, room)
    whole = content(out)
    for number in numbers:
        before = prepare()
        if not os.WIFSIGNALED(forked(lambda at=number: traced(run, killing(at)))):
            raise SystemExit(f"line {number} was not reached")
        recover(out)
        found = content(out) if out.exists() else None
        if found not in (before, whole):
            raise SystemExit(f"killed at line {number}, {found} is left")
        if (found != whole or overwrite) and forked(run):
            raise SystemExit(f"killed at line {number}, the resume failed")
        if content(out) != whole or old_path(out).exists():
            raise SystemExit(f"killed at line {number}, the resumed output differs")
    return len(numbers)


if __name__ == "__main__":
    os.fsync = lambda _: None  # what the kernel has survives a kill, and waiting for the disk is most of the time
    folder = Path(sys.argv[1])
    print(kill_everywhere(folder / "fresh", False, 60), kill_everywhere(folder / "overwrite", True, 1 << 20))  # noqa: T201
