"""`nemo-rl doctor`: check this machine."""

import json
import textwrap
from dataclasses import asdict

import click

from nemo_rl_core.maintenance.doctor.diagnose import CheckResult, diagnose
from nemo_rl_core.store.store import Store

_COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@click.option("--quick", is_flag=True, help="Skip slow checks: imports, the sandbox.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(*, quick: bool, as_json: bool) -> None:
    """Check this machine, and suggest fixes.

    The exit code is 1 if a check fails, which means that runs cannot work on this machine. A
    warning means that some recipes cannot run, or that a feature is missing.
    """
    answers = []
    for answer in diagnose(Store.default(), quick=quick):
        answers.append(answer)
        if not as_json:
            _show(answer)
    counts = {state: sum(each.result.state == state for each in answers) for state in _COLORS}
    if as_json:
        checks = [
            {"name": each.name, **asdict(each.result), "seconds": round(each.seconds, 3)}
            for each in answers
        ]
        click.echo(json.dumps({"checks": checks, "counts": counts}, indent=1))
    else:
        click.echo("\n" + ", ".join(f"{number} {state}" for state, number in counts.items()))
    if counts["fail"]:
        raise SystemExit(1)


def _show(answer: CheckResult) -> None:
    result = answer.result
    state = click.style(f"{result.state:<4}", fg=_COLORS[result.state])
    lines = textwrap.wrap(result.found, 90) or [""]
    click.echo(f"{state}  {answer.name:<14} {lines[0]}")
    for line in lines[1:]:
        click.echo(f"{'':21}{line}")
    if result.fix:
        click.echo(f"{'':21}fix: {result.fix}")
