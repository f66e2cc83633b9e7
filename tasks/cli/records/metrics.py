"""`nemo-rl metrics`: the metrics of a run, as sparklines, a table, CSV or JSON."""

import csv
import json
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import rich_click
from click.shell_completion import CompletionItem
from rich import box
from rich.table import Table
from rich.text import Text

from nemo_rl_core.telemetry.console import console_on
from nemo_rl_core.telemetry.curves import sparkline
from tasks.cli.records.names import complete_runs

if TYPE_CHECKING:
    from nemo_rl_core.history.queries import History
    from nemo_rl_core.history.run_columns import RunRow


class Curve(NamedTuple):
    """A metric of one stage, in order of steps."""

    stage: str
    name: str
    points: list[tuple[int, float]]


def _names(context: click.Context, _parameter: object, incomplete: str) -> list[CompletionItem]:
    from nemo_rl_core.history.queries import History
    from nemo_rl_core.store.store import Store
    from tasks.cli.records.names import find_run

    with History(Store.default()) as history:
        run = find_run(history, context.params.get("run")).id
        names = {name for listed in history.metric_names_of(run).values() for name in listed}
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]


@rich_click.command("metrics")
@click.argument("run", required=False, shell_complete=complete_runs)
@click.argument("names", nargs=-1, metavar="[METRIC]...", shell_complete=_names)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
def metrics(run: str | None, names: tuple[str, ...], *, as_json: bool, as_csv: bool) -> None:
    """Show each METRIC of RUN by step, or the curves of all metrics of a run.

    RUN is the name or the id of a run, the beginning of an id, or a point of a sweep, such as
    RUN:12; without one, the latest run.

        nemo-rl metrics 20260101T120000Z-a1b2c3 reward kl --csv
    """
    from nemo_rl_core.history.queries import History
    from nemo_rl_core.history.results import run_row
    from nemo_rl_core.store.store import Store
    from tasks.cli.records.names import find_run

    if as_json and as_csv:
        raise click.UsageError("choose --json or --csv")
    with History(Store.default()) as history:
        curves = _curves(history, run_row(history, run or find_run(history, None).id), names)
    rows: list[dict[str, Any]] = [
        {"stage": each.stage, "step": step, "metric": each.name, "value": value}
        for each in curves
        for step, value in each.points
    ]
    if as_json:
        for row in rows:
            row["value"] = row["value"] if math.isfinite(row["value"]) else str(row["value"])
        click.echo(json.dumps(rows, allow_nan=False))
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, ["stage", "step", "metric", "value"])
        writer.writeheader()
        writer.writerows(rows)
    elif names:
        _print_steps(curves, names)
    else:
        _print_curves(curves)


def _curves(history: "History", row: "RunRow", names: Sequence[str]) -> list[Curve]:
    from nemo_rl_core.config.names import unknown_names
    from nemo_rl_core.errors import NotRecordedError

    run, nodes = row.id, [node for node in history.nodes(row.run) if row.has(node.point)]
    titles = {node.id: node.title for node in nodes}
    every = history.metric_names_of(row.run)
    recorded = {node: every[node] for node in sorted(every) if node in titles}
    if not recorded:
        raise NotRecordedError(
            f"run {run} has no metrics", fix=f"see its stages: nemo-rl runs {run}"
        )
    recorded_names = sorted({name for listed in recorded.values() for name in listed})
    if unknown := [name for name in names if name not in recorded_names]:
        raise unknown_names(
            f"run {run} has no metric",
            unknown,
            recorded_names,
            otherwise=f"`nemo-rl metrics {run}` lists them",
            error=NotRecordedError,
        )
    return [
        Curve(titles[node], name, points)
        for node in recorded
        for name, points in history.metrics(node, names=[*names] or None).items()
    ]


def _print_curves(curves: Sequence[Curve]) -> None:
    console = console_on()
    for stage in dict.fromkeys(each.stage for each in curves):
        table = Table(title=Text(stage), title_justify="left", box=box.SIMPLE_HEAD)
        for heading in ("metric", "first", "last", "lowest", "highest"):
            table.add_column(heading, justify="left" if heading == "metric" else "right")
        table.add_column("curve", no_wrap=True)
        constant = []
        for each in (curve for curve in curves if curve.stage == stage):
            values = [value for _, value in each.points]
            if len(values) > 1 and len(set(values)) == 1:
                constant.append(f"{each.name} {values[0]:.4g}")
                continue
            figures = (values[0], values[-1], min(values), max(values))
            shown = [f"{figure:.4g}" for figure in figures]
            table.add_row(Text(each.name), *shown, sparkline(values))
        console.print(table)
        if constant:
            console.print(Text(f"constant: {', '.join(constant)}\n"))


def _print_steps(curves: Sequence[Curve], names: Sequence[str]) -> None:
    rows: dict[tuple[str, int], dict[str, float]] = {}
    for each in curves:
        for step, value in each.points:
            rows.setdefault((each.stage, step), {})[each.name] = value
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("stage")
    for heading in ("step", *names):
        table.add_column(Text(heading), justify="right")
    for (stage, step), values in rows.items():
        shown = [f"{values[name]:.6g}" if name in values else "" for name in names]
        table.add_row(Text(stage), str(step), *shown)
    console = console_on()
    console.print(table)
    for name in names:
        curve = [value for each in curves if each.name == name for _, value in each.points]
        console.print(Text(f"{name}  {sparkline(curve)}  {curve[0]:.4g} → {curve[-1]:.4g}"))
