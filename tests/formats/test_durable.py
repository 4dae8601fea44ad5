"""One writer at a time, whole files only, and disk faults that tell what to do."""

import errno
import os

import pytest

from compress_llm.formats.durable import Busy, Lock, disk_faults, publish, remove, write_atomically
from compress_llm.formats.errors import InputError, StoppedEarly


def test_a_lock_is_held_until_released(tmp_path):
    first = Lock(tmp_path / "lock")
    with pytest.raises(Busy):
        Lock(tmp_path / "lock")
    first.release()
    first.release()
    with Lock(tmp_path / "lock"), pytest.raises(Busy):
        Lock(tmp_path / "lock")
    Lock(tmp_path / "lock").release()


def test_a_lock_on_a_removed_file_is_no_lock(tmp_path, monkeypatch):
    """An opener that waited for a writer which removed the file must end up with the file that is there now."""
    real, done = os.open, []

    def removed_under_us(path, *rest):
        handle = real(path, *rest)
        if not done:
            done.append(os.unlink(path))
        return handle

    monkeypatch.setattr(os, "open", removed_under_us)
    with Lock(tmp_path / "lock"), pytest.raises(Busy):
        Lock(tmp_path / "lock")


def test_a_lock_ends_with_its_process(tmp_path):
    child = os.fork()
    if not child:
        Lock(tmp_path / "lock")
        os._exit(0)
    os.waitpid(child, 0)
    Lock(tmp_path / "lock").release()


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "f"
    write_atomically(file, b"old")

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input"):
        write_atomically(file, b"new")
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_publish_replaces_and_remove_takes_anything(tmp_path):
    (tmp_path / "f").write_text("old")
    (tmp_path / "t").write_text("new")
    publish(tmp_path / "t", tmp_path / "f")
    assert (tmp_path / "f").read_text() == "new"
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to("folder")
    for name in ("f", "link", "nothing"):
        remove(tmp_path / name)
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]
    remove(tmp_path / "folder")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "kept", "kind", "words"),
    [
        (errno.ENOSPC, True, StoppedEarly, "make room and run again with --resume"),
        (errno.EDQUOT, True, StoppedEarly, "make room and run again with --resume"),
        (errno.EIO, True, StoppedEarly, "set that right and run again with --resume"),
        (errno.EACCES, False, InputError, "cannot be written"),
        (errno.ENOSPC, False, StoppedEarly, "make room and run again"),
    ],
)
def test_disk_faults_tell_what_to_do(tmp_path, number, kept, kind, words):
    with pytest.raises(kind, match=words), disk_faults("out", tmp_path if kept else None):
        raise OSError(number, os.strerror(number), str(tmp_path / "x"))
