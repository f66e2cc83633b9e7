"""`nemo-rl verify`: find damaged artifacts."""

import json
import os
from dataclasses import asdict

import click
import rich_click

from nemo_rl_core.maintenance.verify import Verdict, repair
from nemo_rl_core.maintenance.verify import verify as check
from nemo_rl_core.store.store import Store
from tasks.cli.records.names import complete_artifacts
from tasks.cli.store.units import show_bytes


@rich_click.command()
@click.argument("artifacts", nargs=-1, metavar="[ARTIFACT]...", shell_complete=complete_artifacts)
@click.option("--repair", "repairs", is_flag=True, help="Move damaged artifacts aside.")
@click.option("--threads", type=click.IntRange(min=1), default=min(4, os.cpu_count() or 1),
              show_default=True, help="Number of hashing threads.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def verify(*, artifacts: tuple[str, ...], repairs: bool, threads: int, as_json: bool) -> None:
    """Hash artifacts again, and find damaged ones.

    ARTIFACT is the name of a folder in the store's artifacts/, a prefix of it, or a path in it.
    Without one, all artifacts, the records of work and the history are checked. The exit code is 1
    if something is damaged, and 0 if all of it could be moved aside.
    """
    store = Store.default()
    verdict = check(store, artifacts, num_threads=threads)
    if repairs:
        verdict = repair(store, verdict)
    if as_json:
        fields = asdict(verdict) | {"is_sound": verdict.is_sound}
        click.echo(json.dumps(fields, indent=1))
    else:
        _show(verdict)
    if not verdict.is_sound:
        raise SystemExit(1)


def _show(verdict: Verdict) -> None:
    for finding in verdict.findings:
        state = "repaired" if finding.repaired else finding.state
        click.echo(f"{state:<8}  {finding.path}\n{'':10}{finding.problem}")
        click.echo(
            f"{'':10}fix: {finding.fix}" if not finding.repaired else f"{'':10}{finding.fix}"
        )
    damaged = sum(each.state == "fail" for each in verdict.findings)
    size = show_bytes(verdict.num_bytes)
    click.echo(f"{verdict.num_artifacts} artifacts, {size} hashed: {damaged or 'nothing'} damaged")
