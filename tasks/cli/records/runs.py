"""`nemo-rl runs`: the runs in this store with their results, and one run in detail."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import click
import rich_click
from click.shell_completion import CompletionItem
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_rl_core.history.cluster import import_folders
from nemo_rl_core.history.labels import set_labels, set_pin
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import State
from nemo_rl_core.history.results import RunQuery, run_row, run_rows
from nemo_rl_core.history.run_columns import COLUMNS, RunRow, page_record, run_record
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.console import console_on
from tasks.cli.records.names import complete_runs, refuse_ignored
from tasks.cli.records.runs_table import DEFAULT_COLUMNS, STYLES, column_names, runs_table

_OF_LIST = ("state", "workflow", "text", "since", "where", "sort", "columns", "limit")
_STATES = [state for state in get_args(State) if state != "cached"]


def _columns(_context: object, _parameter: object, incomplete: str) -> list[CompletionItem]:
    chosen, comma, last = incomplete.rpartition(",")
    sign = "-" if last.startswith("-") else ""
    names = [sign + name for name in ("run", *COLUMNS)]
    return [CompletionItem(chosen + comma + name) for name in names if name.startswith(last)]


@rich_click.command()
@click.argument("run", required=False, shell_complete=complete_runs)
@click.option("--store", type=click.Path(path_type=Path), help="Instead of NEMO_RL_HOME.")
@click.option("--state", type=click.Choice(_STATES), default=None, metavar="STATE",
              help=f"Only runs in this state: {', '.join(_STATES)}.")  # fmt: skip
@click.option("--workflow", default="", help="Only runs of this workflow, such as grpo.")
@click.option("--text", default="",
              help="Only runs with this text in id, recipe, inputs, commit, error, name, tag or "
              "note.")  # fmt: skip
@click.option("--since", type=click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M"]), metavar="TIME",
              help="Only runs that started at this local time or later, such as 2026-01-31 or "
              "2026-01-31T12:00.")  # fmt: skip
@click.option("--where", multiple=True, metavar="CONDITION",
              help="Such as 'accuracy>0.5' or 'grpo.learning_rate=1e-4'; repeatable.")  # fmt: skip
@click.option("--sort", default="", metavar="[-]COLUMN", shell_complete=_columns,
              help="Order by a column or a setting; with - the largest first. By default the "
              "latest first, after pinned runs.")  # fmt: skip
@click.option("--columns", default="", metavar="NAMES", shell_complete=_columns,
              help=f"Columns and settings, separated by commas; + in front adds to "
              f"{','.join(DEFAULT_COLUMNS)}. Others: "
              f"{', '.join(name for name in COLUMNS if name not in DEFAULT_COLUMNS)}.")  # fmt: skip
@click.option("--limit", type=click.IntRange(min=0), default=20, show_default=True,
              help="Maximum number of runs.")  # fmt: skip
@click.option("--name", help="Give RUN this name.")
@click.option("--tag", "tags", multiple=True, metavar="TAG",
              help="Replace the tags of RUN, by none with ''; without RUN, list only runs with the "
              "tag. Repeatable.")  # fmt: skip
@click.option("--note", help="Give RUN this note.")
@click.option("--pin/--unpin", default=None, help="Pin RUN: listed first, and kept by gc.")
@click.option("--import", "imported", multiple=True, metavar="FOLDER",
              type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="First import the folder of an artifact from a cluster.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def runs(
    run: str | None,
    *,
    store: Path | None,
    imported: tuple[Path, ...],
    as_json: bool,
    name: str | None,
    tags: tuple[str, ...],
    note: str | None,
    pin: bool | None,
    **filters: Any,
) -> None:
    """List runs and points of sweeps with their results, or show the stages of RUN.

    Accuracy is that of the first and the last evaluation with its interval, reward the mean of the
    last 10 steps with its curve. Settings are those of the command, and those that differ between
    the listed runs. RUN is an id or the beginning of one.

        nemo-rl runs --sort -accuracy --columns run,accuracy,grpo.learning_rate

        nemo-rl runs 20260101T120000Z --name baseline --pin
    """
    if run is not None:
        refuse_ignored("a RUN", *_OF_LIST)
    if as_json:
        refuse_ignored("--json", "columns")
    opened = Store(store) if store else Store.default()
    if imported:
        import_folders(opened, imported)
    with History(opened) as history:
        if run is None:
            if name is not None or note is not None or pin is not None:
                raise click.UsageError("--name, --note and --pin need the id of a RUN")
            _list(history, tags, as_json=as_json, **filters)
            return
        row = run_row(history, run)
        if name is not None or note is not None or tags:
            kept = list(filter(None, tags)) if tags else None
            set_labels(opened, row.id, name=name, tags=kept, note=note)
        if pin is not None:
            set_pin(opened, row.run, pinned=pin)
        _show(history, run_row(history, row.id), as_json=as_json)


def _list(
    history: History,
    tags: tuple[str, ...],
    *,
    as_json: bool,
    columns: str,
    state: str | None,
    since: datetime | None,
    **filters: Any,
) -> None:
    if len(tags) > 1:
        raise click.UsageError("without a RUN, --tag is given once")
    names = column_names(columns)
    query = RunQuery(
        state=state or "",
        tag="".join(tags),
        columns=[name for name in names if name != "run"],
        since=since.timestamp() if since else None,
        **filters,
    )
    page = run_rows(history, query)
    for line in page.damaged:
        click.echo(f"not shown: {line}", err=True)
    if as_json:
        click.echo(json.dumps(page_record(page)))
        return
    console = console_on()
    console.print(runs_table(page.items, names, history, width=console.width))
    if page.total > len(page.items):
        console.print(f"{len(page.items)} of {page.total}; --limit {page.total} for all")


def _show(history: History, row: RunRow, *, as_json: bool) -> None:
    execution, points = history.execution(row.run), history.points_of(row.run)
    nodes = [node for node in history.nodes(row.run) if row.has(node.point)]
    if as_json:
        click.echo(json.dumps(run_record(history, row)))
        return
    console = console_on()
    console.print(runs_table([row], DEFAULT_COLUMNS, history, width=console.width))
    _show_labels(console, row)
    depth: dict[int | None, int] = {None: -1}
    table = Table("node", "state", "took", "from", "made")
    for node in nodes:
        depth[node.id] = depth.get(node.parent, -1) + 1
        maker = history.node(node.id).maker
        table.add_row(
            Text("  " * depth[node.id] + node.name),
            Text(node.state, style=STYLES[node.state]),
            _took(node.started_at, node.ended_at),
            maker.execution if maker else "",
            Text(node.error.splitlines()[0] if node.error else node.summary),
        )
    console.print(table)
    for artifact in history.artifacts_of(row.run):
        if row.has(points.get(artifact.id)):
            console.print(Text(f"{artifact.kind}: {artifact.id}"))
    if execution.error:
        style = STYLES["stopped"] if execution.state == "stopped" else "red"
        console.print(Text(execution.error, style=style), soft_wrap=True)
    console.print(f"log: nemo-rl logs {row.run}", markup=False, soft_wrap=True)


def _show_labels(console: Console, row: RunRow) -> None:
    labels = {"name": row.labels.name, "tags": ", ".join(row.labels.tags), "note": row.labels.note}
    for word, text in labels.items():
        if text:
            console.print(Text(f"{word}: {text}"), soft_wrap=True)


def _took(began: float, ended: float | None) -> str:
    if ended is None:
        return ""
    minutes, seconds = divmod(round(ended - began), 60)
    return f"{minutes}:{seconds:02d}"
