"""The reference of commands: `nemo-rl`, and the pipelines that `pyflyte run` starts."""

import inspect
from collections.abc import Sequence

import click

from generate.pipelines import Pipeline, pipelines
from workflows.cli import group

FOLDER = "reference/commands"


def pages() -> dict[str, str]:
    """The Markdown of each page, by its path below `docs/`."""
    return {
        f"{FOLDER}/nemo-rl.md": _nemo_rl(),
        f"{FOLDER}/pyflyte.md": _pyflyte(pipelines()),
    }


def _nemo_rl() -> str:
    context = click.Context(group, info_name="nemo-rl")
    parts = ["# nemo-rl", group.help or ""]
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        parts += _command(command, click.Context(command, info_name=name, parent=context))
    return "\n\n".join(parts) + "\n"


def _command(command: click.Command, context: click.Context, level: int = 2) -> list[str]:
    usage = command.get_usage(context).removeprefix("Usage: ")
    text = inspect.cleandoc(command.help or "").replace("\b\n", "")
    heading = context.command_path.removeprefix("nemo-rl ")
    parts = [f"{'#' * level} {heading}", f"```text\n{usage}\n```", text]
    options = [each for each in command.params if isinstance(each, click.Option)]
    if options:
        rows = [_row(option, context) for option in options]
        parts.append("\n".join(["| option | default | meaning |", "|---|---|---|", *rows]))
    if isinstance(command, click.Group):
        for name, each in sorted(command.commands.items()):
            inner = click.Context(each, info_name=name, parent=context)
            parts += _command(each, inner, level + 1)
    return parts


def _row(option: click.Option, context: click.Context) -> str:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    value = "" if option.is_flag else f" `{option.make_metavar(context)}`".replace("|", "\\|")
    shown = option.default if option.show_default and option.default is not None else ""
    return f"| {names}{value} | {f'`{shown}`' if shown != '' else ''} | {option.help or ''} |"


def _pyflyte(found: Sequence[Pipeline]) -> str:
    parts = [
        "# pyflyte run",
        "Each pipeline takes one option, `--config`: a recipe as a YAML or JSON file, or as JSON. "
        "[Recipes](../recipes/index.md) lists their keys.",
        "```sh\n.venv/bin/pyflyte run workflows/grpo.py grpo --config "
        """'{"recipe": "grpo_arithmetic", "seed": 1}'\n```""",
    ]
    for each in found:
        parts += [
            f"## {each.name}",
            f"Stages: {each.stages}",
            f"```sh\n{each.command}\n```",
            f"Without `--config` it runs `workflows/recipes/{each.default}.yaml`.",
        ]
    return "\n\n".join(parts) + "\n"
