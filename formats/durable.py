"""Writing so that a kill or a power cut leaves either the old file or the new one, and never two writers at once."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from .errors import InputError, StoppedEarly

TEMPORARY = ".tmp"  # suffix of a file that is not finished; whoever finds one may delete it
FULL = (errno.ENOSPC, errno.EDQUOT)


class Busy(Exception):
    """Another process holds the lock."""


class Lock:
    """An exclusive lock on a file that ends with the process, however it ends. Raises Busy when it is taken.

    The file's folder must exist (FileNotFoundError). Whoever removes the file must hold the lock: an opener that got
    the old file notices and tries again.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        while True:
            handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                current = _is_still(handle, file)
            except OSError as error:
                os.close(handle)
                if isinstance(error, BlockingIOError):
                    raise Busy(str(file)) from error
                raise
            if current:
                self._handle = handle
                return
            os.close(handle)

    def release(self) -> None:
        """Give the lock up. A second call does nothing."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _is_still(handle: int, file: Path) -> bool:
    """Whether the open file `handle` is the one that the path `file` names now."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(file))
    except FileNotFoundError:
        return False


def sync(path: Path) -> None:
    """Wait until the file, or the names in the directory, are on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(directory: Path) -> None:
    """`sync` every file and folder below `directory`, and itself."""
    for folder, _, files in os.walk(directory, topdown=False):
        for name in files:
            sync(Path(folder, name))
        sync(Path(folder))


def publish(temporary: Path, file: Path) -> None:
    """Give the finished `temporary` its name; both are in one folder, and any older `file` is replaced."""
    sync(temporary)
    os.replace(temporary, file)
    sync(file.parent)


def write_atomically(file: Path, data: bytes) -> None:
    """Replace the content of `file` by `data`, on the disk when this returns."""
    temporary = file.with_name(file.name + TEMPORARY)
    try:
        temporary.write_bytes(data)
        publish(temporary, file)
    finally:
        remove(temporary)  # nothing half written stays behind


def remove(path: Path) -> None:
    """Delete a file, a link or a whole directory; what is not there is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def disk_faults(key: str, kept: Path | None) -> Iterator[None]:
    """Turn what a disk can do to a writer into an error that tells the user what to do.

    Raises StoppedEarly, which says that the finished parts in `kept` wait for `--resume`; with `kept` None, where
    nothing waits, it is for a full disk alone, and InputError for the rest.
    """
    try:
        yield
    except OSError as error:
        cause = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        full = error.errno in FULL
        if kept is None and not full:
            raise InputError(key, f"cannot be written: {cause}", "name a directory that can be") from error
        fix = f"{'make room' if full else 'set that right'} and run again"
        if kept is not None:
            fix += f" with --resume (finished work is kept in {kept})"
        raise StoppedEarly(key, f"writing failed: {cause}", fix) from error
