"""The options of commands that speak to a Flyte cluster."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

_Command = Callable[..., Any]

PROJECT, DOMAIN = "nemo-rl", "development"


def on_a_cluster(command: _Command) -> _Command:
    """The options that name a cluster, a project and a domain."""
    options = [
        click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path),
                     help="The configuration of Flyte's client; by default as pyflyte finds it."),
        click.option("--project", default=PROJECT, show_default=True),
        click.option("--domain", default=DOMAIN, show_default=True),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def as_options(*, config: Path | None, project: str, domain: str) -> list[str]:
    """The options again, as a command line has them."""
    where = [] if config is None else ["--config", str(config)]
    return [*where, "--project", project, "--domain", domain]
