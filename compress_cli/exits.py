"""How a command ends: every way out has one of the codes of docs/exit-codes.md, and says what to do next.

0 done · 1 a gate failed · 2 usage or input error · 3 interrupted, out of memory or disk · 4 a bug · 141 the reader of
a pipe went away, which is what a shell reports for SIGPIPE.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import click

from .. import __version__
from ..formats.errors import CompressError, InputError, StoppedEarly

BUG = 4
READER_GONE = 128 + 13
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
ON_RESUME = "what was finished is kept, run the same command with --resume to continue"


@contextmanager
def exit_codes(resumable: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Turn whatever ends the block into one sentence on stderr and `click.exceptions.Exit` with the right code.

    `resumable` tells, when it matters, whether the command that ran has `--resume`.
    """
    with _terminate_like_ctrl_c():
        try:
            yield
        except click.exceptions.Exit:
            raise
        except click.ClickException as error:
            error.show()
            raise click.exceptions.Exit(InputError.exit_code) from error
        except (KeyboardInterrupt, click.Abort) as error:
            if sys.stderr.isatty():
                click.echo(err=True)  # closes the line on which the terminal shows ^C
            fix = ON_RESUME if resumable() else "run the command again"
            _stop(StoppedEarly(_interrupter(error), "the run was stopped before its end", fix), error)
        except BrokenPipeError as error:
            _detach_output()
            raise click.exceptions.Exit(READER_GONE) from error
        except Exception as error:  # noqa: BLE001 - the outermost frame: what is not known by now is a bug
            _stop(error if isinstance(error, CompressError) else _from_system(error, resumable), error)


@contextmanager
def printing() -> Iterator[None]:
    """Tell a full place of output from a full disk: what is printed is told at the end of work that has gone well.

    Raises StoppedEarly.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        fix = "print to a place with room; what the command has written stands"
        raise StoppedEarly("stdout", "no space left on the device", fix) from error


def _stop(known: CompressError | None, error: BaseException) -> NoReturn:
    if known is None:
        _say(f"internal error, a bug in compress ({_one_line(error)}); {_keep_traceback(error)}.")
        raise click.exceptions.Exit(BUG) from error
    _say(str(known))
    raise click.exceptions.Exit(known.exit_code) from error


def _from_system(error: Exception, resumable: Callable[[], bool]) -> CompressError | None:
    """What the system refused, as an error of ours; None where it is a bug."""
    then = "; " + ON_RESUME if resumable() else ""
    if isinstance(error, OSError) and error.errno in NOT_ALLOWED:
        where = str(error.filename or "a file")
        return InputError(where, str(error.strerror).lower(), "choose a place that you may read and write")
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        return StoppedEarly(str(error.filename or "disk"), "no space left on the device", "free some space" + then)
    if _is_out_of_memory(error):
        cause = f"out of memory ({_one_line(error)})"
        return StoppedEarly("memory", cause, "use smaller batches or shorter sequences" + then)
    return None


def _is_out_of_memory(error: Exception) -> bool:
    """Python's own MemoryError, torch's for a device, or the RuntimeError of torch's host allocator."""
    torch = sys.modules.get("torch")  # what is not loaded has raised nothing
    of_device = getattr(torch, "OutOfMemoryError", MemoryError)
    return isinstance(error, (MemoryError, of_device)) or "DefaultCPUAllocator: can't allocate" in str(error)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def _keep_traceback(error: BaseException) -> str:
    """Write the traceback to a file and say where; on stderr when no file can be written."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    about = f"compress {__version__}, Python {sys.version.split()[0]}, {sys.platform}\n{sys.argv}\n\n"
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="compress-traceback-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(about + text)
    except OSError:
        click.echo(about + text, err=True)
        return "the traceback is above, please report it"
    return f"the traceback is in {file.name}, please report it"


def _say(sentence: str) -> None:
    click.echo(f"Error: {sentence}", err=True)


def _interrupter(error: BaseException) -> str:
    return str(error) or "Ctrl-C"


@contextmanager
def _terminate_like_ctrl_c() -> Iterator[None]:
    """Let SIGTERM unwind the stack as Ctrl-C does, so that files are closed and part files removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise_interrupt(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    raise KeyboardInterrupt(signal.Signals(number).name)


def _detach_output() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not complain about the pipe."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
