"""`nemo-rl`: the command line for pipelines, models, data, runs, the store and the machine.

Each subcommand is one module of this package with a click command of its name. Modules are imported
only when called, so that `nemo-rl --help` is fast and a broken library affects one command only.
"""

import importlib
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from tasks.cli.pipelines import Pipelines

COMMANDS = {
    "card": ("tasks.cli.models.card:card", "Write the model card of a checkpoint."),
    "chat": ("tasks.cli.models.chat:chat", "Chat with an exported model, or ask it once."),
    "check-model": (
        "tasks.cli.models.check_model:check_model",
        "Check a model in the rollout engine.",
    ),
    "cluster-check": (
        "tasks.cli.machine.cluster_check:cluster_check",
        "Check a Flyte cluster before the first run.",
    ),
    "convert": ("tasks.cli.models.convert:convert", "Convert a model into another format."),
    "doctor": ("tasks.cli.machine.doctor:doctor", "Check this machine, and suggest fixes."),
    "eval": ("tasks.cli.models.eval:evaluate", "Show an evaluation, or compare two."),
    "export": ("tasks.cli.models.export:export_command", "Export a model to GGUF, or to the hub."),
    "gc": ("tasks.cli.store.gc:gc", "Free disk: remove artifacts that no kept run needs."),
    "lineage": ("tasks.cli.records.lineage:lineage", "Show the ancestry of an artifact."),
    "plan": ("tasks.cli.recipe.plan:plan", "Plan memory and speed of a recipe on its GPUs."),
    "preview": ("tasks.cli.recipe.preview:preview", "Show the trained tokens of a row of data."),
    "promote": ("tasks.cli.models.promote:promote", "Give a model a name such as production."),
    "reproduce": (
        "tasks.cli.records.reproduce:reproduce",
        "Run an earlier execution again, and compare.",
    ),
    "rollouts": (
        "tasks.cli.records.rollouts:rollouts",
        "Show the recorded rollouts of a training.",
    ),
    "run": ("tasks.cli.recipe.run:run", "Run a pipeline, or only check what it would do."),
    "runs": ("tasks.cli.records.runs:runs", "List executions, and show one."),
    "schedule": (
        "tasks.cli.schedules.schedule:schedule",
        "Run a recipe on a cluster by the clock.",
    ),
    "serve": ("tasks.cli.models.serve:serve", "Serve a model to clients of OpenAI's API."),
    "try-reward": (
        "tasks.cli.recipe.try_reward:try_reward",
        "Score a few rows with the environment of a recipe.",
    ),
    "ui": ("tasks.cli.records.ui:ui", "Serve the page of the runs on this machine."),
    "usage": ("tasks.cli.store.usage:usage", "Show what takes the store's disk space."),
    "verify": ("tasks.cli.store.verify:verify", "Hash artifacts again, and find damaged ones."),
}
"""Name to `module:attribute` and the line that `--help` shows."""


class ExplainedError(click.ClickException):
    """A `NemoRLError` of a command: written to stderr without a traceback, exit code 2."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        """Writes the error after the name of the program."""
        click.echo(f"nemo-rl: {self.message}", file=file, err=file is None)


class LazyGroup(click.Group):
    """A click group whose commands are imported when they are called.

    Errors that the user can fix end the program as `ExplainedError`.
    """

    def __init__(
        self, name: str, table: Mapping[str, tuple[str, str]], help: str, **settings: Any
    ) -> None:
        super().__init__(name, help=help, **settings)
        self._table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in alphabetical order."""
        return sorted(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports and returns one command."""
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
        """Lists the commands from the table, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._table[name][1]) for name in sorted(self._table)])


def command_group(pipelines: "Pipelines") -> LazyGroup:
    """Returns the group of all commands, whose contexts hold the pipelines as `obj`."""
    return LazyGroup(
        "nemo-rl",
        COMMANDS,
        "Commands for pipelines, models, evaluations, data, runs, the store and this machine.",
        context_settings={"obj": pipelines},
    )
