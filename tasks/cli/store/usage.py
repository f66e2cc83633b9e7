"""`nemo-rl usage`: disk usage of the store."""

import json
from collections.abc import Sequence
from dataclasses import asdict

import click
import rich_click

from nemo_rl_core.maintenance.disk_usage import Share, measure_disk
from nemo_rl_core.store.store import Store
from tasks.cli.store.units import show_bytes

_MAX_RUNS_SHOWN = 20


@rich_click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with bytes and every run.")
def usage(*, as_json: bool) -> None:
    """Show what takes the store's disk space.

    Counts allocated blocks as `du` does, not file lengths; a file with several names counts once.
    The parts sum to the total.
    """
    store = Store.default()
    disk_usage = measure_disk(store)
    if as_json:
        click.echo(json.dumps({"store": str(store.root)} | asdict(disk_usage), indent=1))
        return
    click.echo(f"{store.root}: {show_bytes(disk_usage.num_bytes)}")
    _show("area", disk_usage.areas)
    _show("artifacts by stage", disk_usage.stages)
    _show("artifacts by kind", disk_usage.kinds)
    if disk_usage.problem:
        click.echo(f"\nthe artifacts that runs need are unknown: {disk_usage.problem}", err=True)
    if disk_usage.runs:
        click.echo(f"\n{'run':<28} {'needs':>10} {'alone':>10}")
    for run in disk_usage.runs[:_MAX_RUNS_SHOWN]:
        needs, alone = show_bytes(run.num_bytes), show_bytes(run.only_bytes)
        click.echo(f"{run.name:<28} {needs:>10} {alone:>10}")
    if len(disk_usage.runs) > _MAX_RUNS_SHOWN:
        click.echo(f"and {len(disk_usage.runs) - _MAX_RUNS_SHOWN} older runs: see --json")


def _show(title: str, shares: Sequence[Share]) -> None:
    click.echo(f"\n{title:<28} {'size':>10} {'count':>6}")
    for share in shares:
        click.echo(f"{share.name:<28} {show_bytes(share.num_bytes):>10} {share.count:>6}")
