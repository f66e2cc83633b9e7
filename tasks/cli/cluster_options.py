"""Options of commands that call a Flyte cluster."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

_Command = Callable[..., Any]


def on_a_cluster(command: _Command) -> _Command:
    """Adds the options that name a cluster, a project and a domain."""
    options = [
        click.option("--flyte-config", "config",
                     type=click.Path(exists=True, dir_okay=False, path_type=Path),
                     help="Configuration of Flyte's client; by default the one of pyflyte."),
        click.option("--project", default="nemo-rl", show_default=True),
        click.option("--domain", default="development", show_default=True),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def as_options(*, config: Path | None, project: str, domain: str) -> list[str]:
    """Returns the options as words of a command line."""
    where = [] if config is None else ["--flyte-config", str(config)]
    return [*where, "--project", project, "--domain", domain]
