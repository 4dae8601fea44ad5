"""Whatever moment a replacement was cut off in, one complete directory is left."""

import os

import pytest

from compress_llm.formats.durable import Lock
from compress_llm.formats.replacing import LOCK, MARKER, RESULT, SET_ASIDE, old_path, recover, replace, staging_path


@pytest.fixture
def out(tmp_path):
    """A path with a finished result in its staging directory."""
    staging = staging_path(tmp_path / "out")
    (staging / RESULT).mkdir(parents=True)
    (staging / RESULT / "name").write_text("new")
    (staging / "parts").mkdir()
    return tmp_path / "out"


def content(out):
    return (out / "name").read_text()


def older(folder):
    folder.mkdir()
    (folder / "name").write_text("old")


@pytest.mark.parametrize("existed", [False, True])
def test_replace_leaves_only_the_new_directory(out, existed):
    if existed:
        older(out)
    replace(out)
    assert content(out) == "new"
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_rename_brings_the_old_directory_back(out, monkeypatch, failing):
    older(out)
    real, calls = os.rename, []

    def rename(*paths):
        calls.append(paths)
        if len(calls) == failing + 1:
            raise OSError("no")
        real(*paths)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="no"):
        replace(out)
    assert content(out) == "old"
    assert {entry.name for entry in staging_path(out).iterdir()} == {RESULT, "parts"}
    assert not old_path(out).exists()


def test_recover_after_the_first_rename_puts_the_old_one_back(out):
    older(old_path(out))
    (staging_path(out) / MARKER).write_bytes(SET_ASIDE)
    recover(out)
    assert content(out) == "old"
    assert content(staging_path(out) / RESULT) == "new"
    assert not (staging_path(out) / MARKER).exists()


def test_recover_after_the_second_rename_tidies_up(out):
    older(old_path(out))
    (staging_path(out) / RESULT).rename(out)
    (staging_path(out) / MARKER).write_bytes(SET_ASIDE)
    recover(out)
    assert content(out) == "new"
    assert list(out.parent.iterdir()) == [out]


def test_recover_leaves_a_living_writer_alone(out):
    older(old_path(out))
    (staging_path(out) / MARKER).write_bytes(SET_ASIDE)
    with Lock(staging_path(out) / LOCK):
        recover(out)
        assert not out.exists()
    recover(out)
    assert content(out) == "old"


@pytest.mark.parametrize("marked", [False, True])
def test_a_folder_that_only_happens_to_have_the_name_is_never_touched(out, marked):
    older(old_path(out))
    if marked:  # a first commit, which set nothing aside
        (staging_path(out) / RESULT).rename(out)
        (staging_path(out) / MARKER).write_bytes(b"")
    recover(out)
    assert content(old_path(out)) == "old"
    assert out.exists() == marked


def test_nothing_to_recover(tmp_path):
    recover(tmp_path / "out")
    recover(tmp_path / "out" / "..")
    assert not list(tmp_path.iterdir())
