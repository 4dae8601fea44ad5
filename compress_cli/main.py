"""The console command `compress`: a table of commands, each imported only when it is the one to run.

`compress --help` must answer at once, so the table carries the one-line help and nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import click

from .. import __version__
from ..formats.errors import nearest
from .exits import exit_codes, printing
from .options import kebab

# Name → (module beside this file whose `command` it is, what `compress --help` says of it).
COMMANDS = {
    "quantize": (".quantize", "Plan, calibrate, compress and write a model."),
    "verify": (".verify", "Decode and hash every packed tensor of a directory."),
    "inspect": (".inspect", "Show what is in a directory: schemes, bits and bytes per layer."),
    "eval-ppl": (".eval_ppl", "Measure perplexity, and KL to the original; the CI gate."),
    "bench": (".bench", "Time kernels and decoding against bfloat16, with the floor beside each."),
    "doctor": (".doctor", "Show what this machine can do, and why not more."),
}

EPILOG = """\b
Examples:
  compress quantize MODEL -o OUT --scheme W4A16
  compress verify OUT --reference MODEL
  compress eval-ppl OUT --reference MODEL
"""


class LazyGroup(click.Group):
    """A group whose commands are rows of `COMMANDS`; whatever ends one is mapped to an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names in the table's order, which is the order of the journey."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of one command."""
        if cmd_name not in COMMANDS:
            return None
        return import_module(COMMANDS[cmd_name][0], __package__).command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does, which prints `--help` and `--version` here."""
        with exit_codes(), printing():
            return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, but an unknown name is answered with the nearest known one."""
        name = kebab(args[0])
        if name not in COMMANDS and not name.startswith("-"):
            ctx.fail(f"no command is called '{args[0]}'; {nearest(name, COMMANDS)}.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands from the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; see `exits.py` for what happens when it does not end well."""
        with exit_codes(resumable=lambda: _takes_resume(ctx)):
            return super().invoke(ctx)


def _takes_resume(ctx: click.Context) -> bool:
    name = ctx.invoked_subcommand
    row = COMMANDS.get(name or "")
    if row is None:
        return False
    return any(option.name == "resume" for option in import_module(row[0], __package__).command.params)


@click.group(
    cls=LazyGroup,
    epilog=EPILOG,
    context_settings={"token_normalize_func": kebab, "help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, message="compress %(version)s")
def cli() -> None:
    """Make language models small, prove what it cost, and serve the result."""


main: Callable[[], None] = cli
