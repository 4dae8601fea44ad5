"""The moment at which an output directory appears, and the repair of one that was cut off in it.

A directory cannot be replaced by another in one step, so the old one is set aside first. A marker in the staging
directory, on the disk before the first rename, tells whoever comes after a kill that it happened inside this window,
and that the directory set aside is ours to put back or to delete:

    marker, result still in staging   the new directory does not stand: put the old one back, keep staging for a resume
    marker, no result in staging      the new directory stands: delete the old one and staging
    no marker                         nothing was renamed
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from .durable import Busy, Lock, remove, sync, write_atomically

LOCK, MARKER, RESULT = "lock", "committing", "result"
SET_ASIDE = b"the old directory is set aside"  # in the marker, when there was one


def staging_path(out: Path) -> Path:
    """Where the work on `out` goes on: a hidden sibling, so that the last rename stays on one file system."""
    return out.with_name(f".{out.name}.partial")


def old_path(out: Path) -> Path:
    """Where a directory being replaced is set aside."""
    return out.with_name(f".{out.name}.old")


def replace(out: Path) -> None:
    """Put the finished `result` of staging in the place of `out`, whose old content is back if that fails.

    The caller holds the lock, and there is nothing at `old_path(out)`. Raises OSError.
    """
    staging = staging_path(out)
    replacing = os.path.lexists(out)
    write_atomically(staging / MARKER, SET_ASIDE if replacing else b"")
    try:
        if replacing:
            os.rename(out, old_path(out))
        os.rename(staging / RESULT, out)
    finally:
        settle(out)


def settle(out: Path) -> None:
    """Bring `out` and its staging into a state without marker, forwards or back. The caller holds the lock."""
    staging, old = staging_path(out), old_path(out)
    if not (staging / MARKER).exists():
        return
    set_aside = (staging / MARKER).read_bytes() == SET_ASIDE
    if (staging / RESULT).exists():
        if set_aside and not os.path.lexists(out):
            os.rename(old, out)
        sync(out.parent)
        remove(staging / MARKER)
        return
    sync(out.parent)
    if set_aside:
        remove(old)
    clear(staging)


def clear(staging: Path) -> None:
    """Delete a staging directory. The caller holds its lock, whose file goes last and the marker just before it."""
    last = [staging / MARKER, staging / LOCK]
    for entry in staging.iterdir():
        if entry not in last:
            remove(entry)
    for entry in last:
        remove(entry)
    try:
        staging.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):  # the next writer has moved in already
            raise


def recover(out: Path) -> None:
    """Repair `out` if a writer was killed while replacing it. Does nothing when there is nothing to do.

    A writer that is alive is left alone. For readers; a writer settles when it opens its output directory.
    """
    staging = staging_path(out)
    if not out.name or not (staging / MARKER).exists():
        return
    try:
        lock = Lock(staging / LOCK)
    except (Busy, FileNotFoundError):
        return
    with lock:
        settle(out)
