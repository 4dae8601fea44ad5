"""Who hears what: results on stdout, the rest on stderr, nothing but the report with --json."""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Callable

import click
import pytest
from click.testing import CliRunner

from compress_llm.compress_cli.console import Console
from compress_llm.compress_cli.options import Command, reporting
from compress_llm.formats.errors import StoppedEarly


@click.command(cls=Command)
@reporting
def probe(console: Console) -> None:
    for _ in console.track(range(3), "steps", 3):
        pass
    console.note("a note")
    console.detail("a detail")
    console.warn("a warning")
    console.say("a line")
    console.table({"name": "left", "bits": "right"}, [("[bold]model" + ".x" * 60, "4.5")], title="layers")
    console.result({"kl": float("nan")}, lambda: click.echo("the result"))


def test_people_get_everything_but_details() -> None:
    done = CliRunner().invoke(probe)
    assert done.exit_code == 0
    assert done.stdout.startswith("a line\n")
    assert done.stdout.endswith("the result\n")
    assert done.stderr.splitlines() == ["steps  100 %  3/3  0:00 elapsed", "a note", "Warning: a warning"]


def test_tables_keep_whole_names_and_read_no_markup() -> None:
    lines = CliRunner().invoke(probe).stdout.splitlines()
    assert any("[bold]model" + ".x" * 60 in line and line.rstrip().endswith("4.5") for line in lines)


def test_json_is_alone_on_stdout() -> None:
    done = CliRunner().invoke(probe, ["--json"])
    assert json.loads(done.stdout) == {"kl": None}
    assert "a note" in done.stderr


def test_quiet_keeps_results_and_warnings() -> None:
    done = CliRunner().invoke(probe, ["--quiet"])
    assert done.stderr == "Warning: a warning\n"
    assert "the result" in done.stdout


def test_verbose_adds_details() -> None:
    assert "a detail\n" in CliRunner().invoke(probe, ["--verbose"]).stderr


def test_quiet_and_verbose_exclude_each_other() -> None:
    assert CliRunner().invoke(probe, ["-q", "-v"]).exit_code == 2


@pytest.mark.parametrize(
    ("terminal", "term", "kind"), [(True, "xterm", "Bars"), (True, "dumb", "Lines"), (False, "xterm", "Lines")]
)
def test_bars_only_where_they_can_be_drawn(
    terminal: bool, term: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("TERM", term)
    assert type(Console()._progress).__name__ == kind


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("show", [lambda: click.echo("a line"), lambda: Console().table({"name": "left"}, [("x",)])])
def test_output_without_room_is_not_a_run_to_resume(
    as_json: bool, show: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", Full())
    with pytest.raises(StoppedEarly, match="stdout: no space left .* what the command has written stands"):
        Console(as_json).result({"kl": 0.5}, show)
