"""Lines of checks on the terminal: state, name, result, and the fix below."""

import textwrap

import click

from nemo_rl_core.maintenance.doctor.check import Result

COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}
"""Colors of the states, in the order in which they are counted."""


def show_check(name: str, result: Result) -> None:
    """Prints one check."""
    state = click.style(f"{result.state:<4}", fg=COLORS[result.state])
    lines = textwrap.wrap(result.found, 90) or [""]
    click.echo(f"{state}  {name:<14} {lines[0]}")
    for line in lines[1:]:
        click.echo(f"{'':21}{line}")
    if result.fix:
        click.echo(f"{'':21}fix: {result.fix}")
