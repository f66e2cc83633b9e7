"""`nemo-rl`: the command line for models, evaluations, data, runs, the store and the machine.

A subcommand is one file here that holds a click command of its name. Its module is imported only
when it is called, so that `nemo-rl --help` is quick and one broken library stops one command.
"""

import importlib
from collections.abc import Mapping
from typing import IO, Any

import click

COMMANDS = {
    "card": ("tasks.cli.card:card", "Write the model card of a checkpoint."),
    "chat": ("tasks.cli.chat:chat", "Ask an exported model."),
    "check-model": ("tasks.cli.check_model:check_model", "Check a model in the rollout engine."),
    "convert": ("tasks.cli.convert:convert", "Convert a model into another form."),
    "doctor": ("tasks.cli.doctor:doctor", "Check this machine, and say what to do."),
    "eval": ("tasks.cli.eval:evaluate", "Read an evaluation, or compare two."),
    "gc": ("tasks.cli.gc:gc", "Free disk: remove what no kept run needs."),
    "lineage": ("tasks.cli.lineage:lineage", "Show what an artifact was made from."),
    "preview": ("tasks.cli.preview:preview", "Show what is trained on in a row of data."),
    "reproduce": ("tasks.cli.reproduce:reproduce", "Run an earlier execution again, and compare."),
    "rollouts": ("tasks.cli.rollouts:rollouts", "Read the recorded rollouts of a training."),
    "runs": ("tasks.cli.runs:runs", "List executions, and show one."),
    "ui": ("tasks.cli.ui:ui", "Serve the page of the runs on this machine."),
    "usage": ("tasks.cli.usage:usage", "Account for the store's disk, to the block."),
    "verify": ("tasks.cli.verify:verify", "Hash artifacts again, and find what is damaged."),
}
"""Name to `module:attribute` and the line that `--help` shows."""


class ExplainedError(click.ClickException):
    """A `NemoRLError` of a command: written to stderr without a traceback, exit code 2."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        """Writes the error behind the name of the program."""
        click.echo(f"nemo-rl: {self.message}", file=file, err=file is None)


class LazyGroup(click.Group):
    """A click group whose commands are imported when they are called.

    An error of a command that the user can mend ends the program as `ExplainedError` does.

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

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        from nemo_rl_core.errors import NemoRLError

        try:
            return super().invoke(ctx)
        except NemoRLError as error:
            raise ExplainedError(str(error)) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands from the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._table[name][1]) for name in sorted(self._table)])


group = LazyGroup(
    "nemo-rl",
    COMMANDS,
    "Use models and evaluations; see what is in the store, what ran, and what this machine can do.",
)


def main() -> None:
    """Runs `nemo-rl`."""
    group(prog_name="nemo-rl")
