"""Every way out has its code and one sentence that says what to do."""

from __future__ import annotations

import errno
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import pytest
import torch
from click.exceptions import Exit

from compress_llm.compress_cli.exits import exit_codes
from compress_llm.formats.errors import GateFailed, InputError, StoppedEarly

# A command with --resume that says so when it runs, and then does what its argument names.
PROBE = """
import sys, time, click
from compress_llm.compress_cli import main
from compress_llm.compress_cli.options import Command, reporting
@click.command("probe", cls=Command)
@click.argument("what")
@click.option("--resume", is_flag=True)
@reporting
def command(what, resume, console):
    console.say("started")
    while what == "sleep": time.sleep(0.05)
    while what == "talk": console.say("line" * 1000)
    raise ValueError("no such\\nluck")
main.COMMANDS["probe"] = ("__main__", "")
main.main()
"""


def start(what: str, **streams: int) -> subprocess.Popen[str]:
    """A shell lets what it starts in the background ignore Ctrl-C, tests included; the probe does not."""

    def listen() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen([sys.executable, "-c", PROBE, "probe", what], text=True, preexec_fn=listen, **streams)


def ending(error: BaseException, capsys: pytest.CaptureFixture[str], resumable: bool = False) -> tuple[int, str]:
    with pytest.raises(Exit) as caught, exit_codes(lambda: resumable):
        raise error
    said = capsys.readouterr()
    assert said.out == ""
    return caught.value.exit_code, said.err


def test_a_good_end_passes() -> None:
    with exit_codes():
        pass


@pytest.mark.parametrize(("kind", "code"), [(GateFailed, 1), (InputError, 2), (StoppedEarly, 3)])
def test_our_errors(kind: type[InputError], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(kind("key", "cause", "fix"), capsys) == (code, "Error: key: cause; fix.\n")


def test_clicks_errors_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (click.UsageError("so not"), click.FileError("f", "so not"), click.ClickException("so not")):
        code, said = ending(error, capsys)
        assert code == 2
        assert "so not" in said


def test_a_chosen_exit_passes_through() -> None:
    with pytest.raises(Exit) as caught, exit_codes():
        raise Exit(1)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        OSError(errno.ENOSPC, "No space left on device", "/data/out"),
        OSError(errno.EDQUOT, "Disk quota exceeded", "/data/out"),
    ],
    ids=["memory", "gpu", "host", "disk", "quota"],
)
def test_shortages(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = ending(error, capsys)
    assert (code, said.count("\n")) == (3, 1)
    assert "--resume" not in said
    code, said = ending(error, capsys, resumable=True)
    assert code == 3
    assert "--resume" in said


def test_a_host_allocation_that_fails_is_a_shortage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exit) as caught, exit_codes():
        torch.empty(1 << 60, dtype=torch.uint8)
    assert caught.value.exit_code == 3
    assert "out of memory" in capsys.readouterr().err


def test_a_refused_file_is_the_users(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = ending(PermissionError(errno.EACCES, "Permission denied", "/root/out"), capsys)
    assert code == 2
    assert said == "Error: /root/out: permission denied; choose a place that you may read and write.\n"


def test_anything_else_is_a_bug_with_a_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code, said = ending(ZeroDivisionError("by\nzero"), capsys)
    assert code == 4
    assert said.startswith(
        "Error: internal error, a bug in compress (ZeroDivisionError: by zero); the traceback is in "
    )
    (kept,) = tmp_path.iterdir()
    assert str(kept) in said
    assert "ZeroDivisionError" in kept.read_text()
    assert "in ending" in kept.read_text()


def test_a_traceback_that_cannot_be_kept_is_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    code, said = ending(ZeroDivisionError("by zero"), capsys)
    assert code == 4
    assert "Traceback (most recent call last)" in said


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_signals_interrupt_and_resume_is_offered(number: signal.Signals, name: str) -> None:
    with start("sleep", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 3
    assert re.fullmatch(rf"Error: {name}: the run was stopped .* with --resume to continue\.\n", said)


def test_a_bug_in_a_command_ends_with_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with start("fail", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 4
    assert said.startswith("Error: internal error, a bug in compress (ValueError: no such luck)")


def test_a_reader_that_goes_away_is_no_news() -> None:
    with start("talk", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (141, "")
