"""`nemo-rl doctor`: check this machine."""

from dataclasses import asdict

import click
import rich_click

from nemo_rl_core.maintenance.doctor.diagnose import diagnose
from nemo_rl_core.store.store import Store
from tasks.cli.machine.check_table import end_checks, show_check


@rich_click.command()
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
            show_check(answer.name, answer.result)
    checks = [
        {"name": each.name, **asdict(each.result), "seconds": round(each.seconds, 3)}
        for each in answers
    ]
    end_checks(checks, as_json=as_json)
