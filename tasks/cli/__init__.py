"""`nemo-rl`: what a user asks of the store, its runs and the machine.

A subcommand is one file here that holds a click command of its name. Its module is imported only
when it is called, so that `nemo-rl --help` is quick and one broken library stops one command.
"""

import importlib
from collections.abc import Mapping

import click

COMMANDS = {
    "card": ("tasks.cli.card:card", "Write the model card of a checkpoint."),
    "doctor": ("tasks.cli.doctor:doctor", "Check this machine, and say what to do."),
    "gc": ("tasks.cli.gc:gc", "Free disk: remove what no kept run needs."),
    "lineage": ("tasks.cli.lineage:lineage", "Show what an artifact was made from."),
    "reproduce": ("tasks.cli.reproduce:reproduce", "Run an earlier execution again, and compare."),
    "runs": ("tasks.cli.runs:runs", "List executions, and show one."),
    "ui": ("tasks.cli.ui:ui", "Serve the page of the runs on this machine."),
    "usage": ("tasks.cli.usage:usage", "Account for the store's disk, to the block."),
    "verify": ("tasks.cli.verify:verify", "Hash artifacts again, and find what is damaged."),
}
"""Name to `module:attribute` and the line that `--help` shows."""


class LazyGroup(click.Group):
    """A click group whose commands are imported when they are called.

    Args:
        table: Name to `module:attribute` and one line of help.
    """

    def __init__(self, name: str, table: Mapping[str, tuple[str, str]], help: str) -> None:
        super().__init__(name, help=help)
        self._table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the alphabet."""
        return sorted(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the one command that was asked for."""
        if cmd_name not in self._table:
            return None
        module, _, attribute = self._table[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands from the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._table[name][1]) for name in sorted(self._table)])


group = LazyGroup("nemo-rl", COMMANDS, "What is in the store, what ran, and what this machine can.")


def main() -> None:
    """Runs `nemo-rl`; an error that is the user's to mend is told without a traceback."""
    from nemo_rl_core.errors import NemoRLError

    try:
        group(prog_name="nemo-rl")
    except NemoRLError as error:
        click.echo(f"nemo-rl: {error}", err=True)
        raise SystemExit(2) from error
