"""`nemo-rl`: the command line for pipelines, models, data, runs, the store and the machine.

Each subcommand is one module of this package with a click command of its name. Modules are imported
only when called, so that `nemo-rl --help` is fast and a broken library affects one command only.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import click
from rich_click import RichCommand, RichCommandPanel, RichContext, RichGroup

if TYPE_CHECKING:
    from rich_click import RichHelpFormatter

    from tasks.cli.pipelines import Pipelines

Groups = Mapping[str, Mapping[str, tuple[str, str]]]
"""By heading: the name of a command, `.module:attribute` and the line that `--help` shows."""

GROUPS: Groups = {
    "Train": {
        "run": (".recipe.run:run", "Run a pipeline, or only check what it would do."),
        "recipes": (".recipe.recipes:recipes", "List pipelines and their recipes."),
        "keys": (".recipe.keys:keys", "List the settings of recipes, with defaults."),
        "plan": (".recipe.plan:plan", "Plan memory and speed of a recipe on its GPUs."),
        "preview": (".recipe.preview:preview", "Show the trained tokens of a row of data."),
        "try-reward": (
            ".recipe.try_reward:try_reward",
            "Score a few rows with the environment of a recipe.",
        ),
        "schedule": (".schedules.schedule:schedule", "Run a recipe on a cluster on a schedule."),
    },
    "Runs": {
        "runs": (".records.runs:runs", "List runs with their results, and show one."),
        "metrics": (".records.metrics:metrics", "Show the metrics of a run by step."),
        "logs": (".records.logs:logs", "Show or follow the log of a run."),
        "ui": (".records.ui:ui", "Serve the page of the runs on this machine."),
        "share": (".records.share:share", "Write a run or a comparison as an HTML file."),
        "rollouts": (".records.rollouts:rollouts", "Show the recorded rollouts of a training."),
        "lineage": (".records.lineage:lineage", "Show the ancestry of an artifact."),
        "reproduce": (".records.reproduce:reproduce", "Repeat an earlier run, and compare."),
    },
    "Models": {
        "eval": (".models.eval:evaluate", "Show an evaluation, or compare two."),
        "chat": (".models.chat:chat", "Chat with an exported model, or ask it once."),
        "serve": (".models.serve:serve", "Serve a model to clients of OpenAI's API."),
        "promote": (".models.promote:promote", "Give a model a name such as production."),
        "card": (".models.card:card", "Write the model card of a checkpoint."),
        "export": (".models.export:export_command", "Export a model to GGUF, or to the hub."),
        "convert": (".models.convert:convert", "Convert a model into another format."),
        "check-model": (".models.check_model:check_model", "Check a model in the rollout engine."),
    },
    "Machine and store": {
        "doctor": (".machine.doctor:doctor", "Check this machine, and suggest fixes."),
        "cluster-check": (
            ".machine.cluster_check:cluster_check",
            "Check a Flyte cluster before the first run.",
        ),
        "usage": (".store.usage:usage", "Show the disk usage of the store."),
        "gc": (".store.gc:gc", "Free disk: remove artifacts that no kept run needs."),
        "verify": (".store.verify:verify", "Hash artifacts again, and find damaged ones."),
    },
}

COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}


class ExplainedError(click.ClickException):
    """A `NemoRLError` of a command: written to stderr without a traceback, exit code 2."""

    exit_code = 2


class LazyGroup(RichGroup):
    """A click group whose commands are imported when they are called.

    Errors that the user can fix end the program as `ExplainedError`.
    """

    def __init__(self, name: str, groups: Groups, help: str, **settings: Any) -> None:
        super().__init__(name=name, help=help, **settings)
        self._groups = groups
        self._table = {name: entry for group in groups.values() for name, entry in group.items()}

    def main(self, *args: Any, **settings: Any) -> Any:
        """Runs a command; errors are plain lines, so that their paths can be copied."""
        return click.Group.main(self, *args, **settings)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in alphabetical order."""
        return sorted(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports and returns one command."""
        if cmd_name not in self._table:
            return None
        module, _, attribute = self._table[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module, __name__), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggests a name for a misspelled one."""
        from nemo_rl_core.config.names import name_hint

        if args[0] not in self._table and not args[0].startswith("-"):
            hint = name_hint(args[0], self._table) or "`nemo-rl --help` lists the commands."
            ctx.fail(f"No such command {args[0]!r}. {hint[0].upper()}{hint[1:]}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        from nemo_rl_core.errors import NemoRLError

        try:
            return super().invoke(ctx)
        except NemoRLError as error:
            raise ExplainedError(str(error)) from error

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the options and the commands by group, without importing the commands."""
        commands: dict[str, click.Command] = {
            name: RichCommand(name=name, help=self._table[name][1]) for name in self._table
        }
        listed = RichGroup(name=self.name, params=self.params, commands=commands)
        for title, group in self._groups.items():
            listed.add_panel(RichCommandPanel(title, commands=[*group]))
        listed.format_options(
            RichContext(listed, info_name=ctx.info_name), cast("RichHelpFormatter", formatter)
        )


def command_group(pipelines: "Pipelines") -> LazyGroup:
    """Returns the group of all commands, whose contexts hold the pipelines as `obj`."""
    group = LazyGroup(
        "nemo-rl",
        GROUPS,
        "Train, evaluate and serve language models, and look at the runs of this machine.\n\n"
        "Begin with `nemo-rl doctor` and `nemo-rl run grpo grpo_ci`.",
        context_settings={"obj": pipelines, "rich_help_config": {"theme": "default-slim"}},
    )
    return click.version_option(package_name="nemo-rl-flow")(group)
