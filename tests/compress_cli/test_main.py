"""The command group: fast help, both spellings, the nearest name, the table and the modules in step."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from compress_llm import __version__
from compress_llm.compress_cli.main import COMMANDS, cli
from compress_llm.compress_cli.options import Command, kebab

FULL = Path("/dev/full")
HEAVY = ("torch", "transformers", "datasets", "numpy", "rich", "safetensors", "triton")


def children_seconds() -> float:
    """Processor seconds of finished child processes: unlike wall time, the same on a busy machine."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_help_is_instant() -> None:
    spent = []
    for _ in range(5):
        before = children_seconds()
        subprocess.run([sys.executable, "-m", "compress_llm", "--help"], check=True, capture_output=True)
        spent.append(children_seconds() - before)
    assert min(spent) < 0.3


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)], ids=" ".join
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from compress_llm.compress_cli.main import main\n"
        "try: main()\n"
        f"finally: print(*sorted(set(sys.modules) & set({HEAVY})), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stderr.split()) == (0, [])


@pytest.mark.parametrize("name", COMMANDS)
def test_table_and_command_agree(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert isinstance(command, Command)
    flags = {flag for option in command.params for flag in option.opts}
    assert {"--json", "--quiet", "--verbose"} <= flags
    assert not [flag for flag in flags if flag.startswith("--") and "_" in flag]


def test_version() -> None:
    assert CliRunner().invoke(cli, ["--version"]).output == f"compress {__version__}\n"


@pytest.mark.skipif(not FULL.exists(), reason="this system has no device that is always full")
@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["inspect", "--help"]], ids=" ".join)
def test_output_without_room_is_one_sentence(arguments: list[str]) -> None:
    with FULL.open("w") as full:
        command = [sys.executable, "-m", "compress_llm", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 3
    assert re.fullmatch(r"Error: stdout: no space left on the device; print to a place with room; .*\.\n", done.stderr)


def test_unknown_command_names_the_nearest() -> None:
    done = CliRunner().invoke(cli, ["quantise"])
    assert done.exit_code == 2
    assert "no command is called 'quantise'; did you mean 'quantize'." in done.stderr


def test_unknown_option_is_a_usage_error() -> None:
    assert CliRunner().invoke(cli, ["doctor", "--no-such-flag"]).exit_code == 2
    assert CliRunner().invoke(cli, ["--no-such-flag"]).exit_code == 2


def test_commands_take_both_spellings() -> None:
    assert CliRunner().invoke(cli, ["eval_ppl", "--help"]).exit_code == 0


def test_options_take_both_spellings_and_values_stay() -> None:
    @click.command(cls=Command)
    @click.option("--group-size")
    @click.option("--dry-run", is_flag=True)
    def probe(group_size: str, dry_run: bool) -> None:
        click.echo(f"{group_size} {dry_run}")

    for arguments in (
        ["--group_size", "a_b", "--dry_run"],
        ["--group-size=a_b", "--dry-run"],
        ["--group_size=a_b", "--dry_run"],
    ):
        assert CliRunner().invoke(probe, arguments).output == "a_b True\n"


def test_kebab() -> None:
    assert kebab("num_samples") == "num-samples"


@pytest.mark.parametrize("arguments", [["quantize", "-o", ""], ["eval-ppl", "--check", ""]])
def test_an_empty_path_is_not_the_current_directory(arguments: list[str]) -> None:
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 2
    assert f"Error: {arguments[1]} '': is empty; name a path." in done.stderr
