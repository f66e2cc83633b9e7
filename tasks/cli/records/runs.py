"""`nemo-rl runs`: the runs in this store."""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import click
import rich_click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_rl_core.history.cluster import import_folders
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import Execution, Node, State
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.console import console_on

_STYLES = {
    "running": "bold blue",
    "succeeded": "green",
    "cached": "cyan",
    "failed": "bold red",
    "stopped": "yellow",
    "aborted": "yellow",
}
_STATES = [state for state in get_args(State) if state != "cached"]


@rich_click.command()
@click.argument("run", required=False)
@click.option("--store", type=click.Path(path_type=Path), help="Instead of NEMO_RL_HOME.")
@click.option("--state", type=click.Choice(_STATES), help="Only runs in this state.")
@click.option("--workflow", help="Only runs of this workflow, such as grpo.")
@click.option(
    "--text", default="", help="Only runs with this text in id, recipe, inputs, commit or error."
)
@click.option("--since", type=click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M"]), help="UTC.")
@click.option("--limit", default=20, show_default=True, help="Maximum number of runs.")
@click.option(
    "--import",
    "imported",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="First import the folder of an artifact from a cluster; repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def runs(
    run: str | None,
    store: Path | None,
    since: datetime | None,
    imported: tuple[Path, ...],
    as_json: bool,
    **filters: Any,
) -> None:
    """Lists runs, the latest first, or shows the nodes of RUN."""
    opened = Store(store) if store else Store.default()
    if imported:
        import_folders(opened, imported)
    console = console_on()
    with History(opened) as history:
        if run is not None:
            execution, nodes = history.execution(run), history.nodes(run)
            if as_json:
                click.echo(json.dumps({**asdict(execution), "nodes": [asdict(n) for n in nodes]}))
            else:
                _show(console, execution, nodes, history)
            return
        began = since.replace(tzinfo=UTC).timestamp() if since else None
        page = history.executions(since=began, **filters)
    for line in page.damaged:
        click.echo(f"not shown: {line}", err=True)
    if as_json:
        click.echo(json.dumps(asdict(page)))
        return
    console.print(_listed(page.items))
    if page.total > len(page.items):
        console.print(f"{len(page.items)} of {page.total}; --limit {page.total} for all")


def _listed(executions: tuple[Execution, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    # Ids begin with the time in UTC.
    for heading in ("run", "workflow", "recipe", "state"):
        table.add_column(heading, no_wrap=heading in ("run", "state"))
    for heading in ("took", "tasks", "cached"):
        table.add_column(heading, justify="right")
    for each in executions:
        table.add_row(
            each.id,
            Text(each.workflow.rpartition(".")[2]),
            Text(each.recipe),
            Text(each.state, style=_STYLES[each.state]),
            _took(each.started_at, each.ended_at),
            str(each.num_nodes),
            str(each.num_cached),
        )
    return table


def _show(console: Console, execution: Execution, nodes: list[Node], history: History) -> None:
    console.print(_listed((execution,)))
    depth: dict[int | None, int] = {None: -1}
    table = Table("node", "state", "took", "from", "made")
    for node in nodes:
        depth[node.id] = depth.get(node.parent, -1) + 1
        maker = history.node(node.id).maker
        table.add_row(
            Text("  " * depth[node.id] + node.name),
            Text(node.state, style=_STYLES[node.state]),
            _took(node.started_at, node.ended_at),
            maker.execution if maker else "",
            Text(node.error.splitlines()[0] if node.error else node.summary),
        )
    console.print(table)
    if execution.error:
        style = _STYLES["stopped"] if execution.state == "stopped" else "red"
        console.print(Text(execution.error, style=style), soft_wrap=True)
    console.print(f"log: {execution.log_path}", markup=False, soft_wrap=True)


def _took(began: float, ended: float | None) -> str:
    if ended is None:
        return ""
    minutes, seconds = divmod(round(ended - began), 60)
    return f"{minutes}:{seconds:02d}"
