"""Lines of checks on the terminal: state, name, result, and the fix below."""

import json
import textwrap
from collections.abc import Sequence
from typing import Any

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


def end_checks(checks: Sequence[dict[str, Any]], *, as_json: bool, **more: str) -> None:
    """Prints the number of checks in each state, or all as JSON; exits with 1 if one has failed."""
    counts = {state: sum(check["state"] == state for check in checks) for state in COLORS}
    if as_json:
        click.echo(json.dumps({**more, "checks": checks, "counts": counts}, indent=1))
    else:
        click.echo("\n" + ", ".join(f"{number} {state}" for state, number in counts.items()))
    if counts["fail"]:
        raise SystemExit(1)
