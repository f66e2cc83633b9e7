"""`nemo-rl runs`: the runs in this store with their results, and one run in detail."""

import json
import math
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import click
import rich_click
from click.shell_completion import CompletionItem
from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from nemo_rl_core.history.cluster import import_folders
from nemo_rl_core.history.labels import set_labels, set_pin
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import State
from nemo_rl_core.history.results import RunQuery, run_row, run_rows
from nemo_rl_core.history.run_columns import (
    COLUMNS,
    RunRow,
    differing,
    page_record,
    run_record,
    shown_settings,
    value_of,
)
from nemo_rl_core.history.run_results import Accuracy, sparkline
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.console import console_on
from nemo_rl_core.telemetry.curves import sparkline as bars
from nemo_rl_core.telemetry.display_lines import clock
from tasks.cli.records.names import complete_runs, refuse_ignored

STYLES = {
    "running": "bold blue",
    "succeeded": "green",
    "cached": "cyan",
    "failed": "bold red",
    "stopped": "yellow",
    "aborted": "yellow",
}
DEFAULT_COLUMNS = ("run", "recipe", "state", "accuracy", "reward", "took", "settings")
_WIDE = 120
"""Columns of a terminal that has room for all default columns."""
_SPARK_WIDTH = 8
_MAX_SETTINGS = 4
_RIGHT = ("took", "tokens", "gpu_hours", "money", "stages", "cached", "step", "gain", "loss")


def column_names(text: str) -> list[str]:
    """Returns the columns in a list with commas; `+` in front adds to the default ones."""
    names = [name.strip() for name in text.removeprefix("+").split(",") if name.strip()]
    return [*DEFAULT_COLUMNS, *names] if text.startswith("+") or not text else names


def runs_table(
    rows: Sequence[RunRow], names: Sequence[str], history: History, *, width: int
) -> Table:
    """Returns the table of rows with the columns of these names.

    In a narrow terminal the default columns are fewer: state and time are below the id, and
    intervals are left out.
    """
    is_narrow = width < _WIDE and [*names] == [*DEFAULT_COLUMNS]
    if is_narrow:
        names = [name for name in names if name not in ("state", "took")]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in names:
        is_plain = name in ("run", "state", "took", "accuracy", "reward")
        justify: JustifyMethod = "right" if name in _RIGHT else "left"
        table.add_column(Text(name), no_wrap=is_plain, justify=justify, overflow="fold")
    different = differing(rows)
    for row in rows:
        cells = {name: _cell(row, name, different[row.id], history) for name in names}
        if is_narrow:
            below = Text.assemble("\n", _cell(row, "state", (), history), f"  {_duration(row)}")
            cells["run"].append_text(below)
            cells["accuracy"] = Text(re.sub(r" \[[^]]*\]", "", cells["accuracy"].plain))
        table.add_row(*cells.values())
    return table


def _cell(row: RunRow, name: str, different: Sequence[str], history: History) -> Text:
    if name == "state":
        return Text(row.state, style=STYLES[row.state])
    if name == "settings":
        settings = [
            f"{key}={_plain(value)}" for key, value in shown_settings(row, different).items()
        ]
        more = len(settings) - _MAX_SETTINGS
        shown = settings[:_MAX_SETTINGS] + ([f"{more} more"] if more > 0 else [])
        return Text(", ".join(shown))
    if name in ("reward", "loss"):
        return Text(_last_mean(row, name, history))
    if name in COLUMNS or name == "run":
        format_row = _FORMATS.get(name)
        return Text(format_row(row) if format_row else _plain(COLUMNS[name].value(row)))
    return Text(_plain(value_of(row, name)))


def _last_mean(row: RunRow, name: str, history: History) -> str:
    value = getattr(row.results, name)
    if value is None:
        return ""
    values = sparkline(history, row.results, row.ended_at) if row.results.metric == name else []
    return f"{value:.3f} {bars(values, _SPARK_WIDTH)}".rstrip()


def _accuracy(row: RunRow) -> str:
    before, after = row.results.before, row.results.after
    return " → ".join(_measured(each) for each in (before, after) if each is not None)


def _measured(measured: Accuracy) -> str:
    bounds = (measured.low, measured.high)
    interval = " [{:.3f}, {:.3f}]".format(*bounds) if None not in bounds else ""
    return f"{measured.value:.3f}{interval}"


def _duration(row: RunRow) -> str:
    end = row.ended_at if row.ended_at is not None else datetime.now().timestamp()
    return clock(end - row.started_at)


def _step(row: RunRow) -> str:
    step, total = row.results.step, row.results.num_steps
    return "" if step is None else f"{step}/{total}" if total else str(step)


def _money(row: RunRow) -> str:
    money = row.results.money
    return "" if money is None else f"{money:.2f} {row.results.currency}".rstrip()


def _plain(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else str(value)
    return f"{value:,}" if type(value) is int else str(value)


_FORMATS: dict[str, Callable[[RunRow], str]] = {
    "run": lambda row: ("* " if row.pinned else "") + row.id,
    "accuracy": _accuracy,
    "took": _duration,
    "step": _step,
    "money": _money,
    "started": lambda row: f"{datetime.fromtimestamp(row.started_at):%Y-%m-%d %H:%M}",
    "pin": lambda row: "pinned" if row.pinned else "",
}


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
            "" if node.ended_at is None else clock(node.ended_at - node.started_at),
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
