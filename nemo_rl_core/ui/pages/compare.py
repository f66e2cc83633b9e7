"""Comparison of any number of runs and points of sweeps."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from nemo_rl_core.errors import ConfigError
from nemo_rl_core.evals.sweep import summarize
from nemo_rl_core.history.differences import MISSING, differences
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import point_label
from nemo_rl_core.history.results import RunQuery, run_row, run_rows
from nemo_rl_core.history.run_columns import COLUMNS, RunRow, grouped, value_of
from nemo_rl_core.history.run_results import sparkline
from nemo_rl_core.history.run_settings import differing_settings, setting_value
from nemo_rl_core.ui import curves
from nemo_rl_core.ui.charts import Chart
from nemo_rl_core.ui.compared import compared, side_by_side
from nemo_rl_core.ui.pages.executions import NUMERIC
from nemo_rl_core.ui.pages.parameters import history_of, offset, parameter
from nemo_rl_core.ui.plots import (
    Points,
    Scatter,
    overlay,
    parallel,
    scatter,
    sparkline_points,
)
from nemo_rl_core.ui.templating import render, render_message
from nemo_rl_core.ui.text import NONE

_RECENT, _MOST = 30, 24
_COLUMNS = ("name", "state", "recipe", "accuracy", "reward", "verdict", "step", "took", "tokens")
_PROMPTS = 10
_MOST_AXES = 6


def compare(request: Request, *, shared: bool = False) -> Response:
    """Compares settings, evaluations, curves and completions of runs.

    Args:
        shared: Whether the page will be a single file.
    """
    if request.app.state.source.is_empty():
        text = "This store has no runs yet. Run a workflow first."
        return render_message(request, "Compare", text, section="compare", command="make grpo")
    history = history_of(request)
    ids = list(dict.fromkeys(i.strip() for i in request.query_params.getlist("run") if i.strip()))
    rows = _rows(history, ids)
    context: dict[str, Any] = {
        "section": "compare",
        "ids": [*ids, ""],
        "metric": parameter(request, "metric"),
        "fold": parameter(request, "fold"),
        "recent": history.executions(limit=_RECENT).items,
        "refused": "",
    }
    if len(rows) > _MOST:
        context["refused"] = f"At most {_MOST} runs can be compared; {len(rows)} are chosen."
    if shared and (not rows or context["refused"]):
        raise ConfigError(
            "these runs cannot be shared as one file",
            expected=f"1 to {_MOST} runs",
            got=f"{len(rows)}",
            fix="name fewer runs",
        )
    if not rows or context["refused"]:
        return render(request, "compare.html", rows=(), **context)
    names = sorted(differing_settings([row.settings for row in rows]))
    labels = _labels(rows)
    charts, num_left_out = _overlaid(history, rows, labels, context["metric"], context["fold"])
    start = offset(request)
    completions, num_prompts = side_by_side(history, rows, start, _PROMPTS)
    return render(
        request,
        "compare.html",
        live=not shared and any(row.state == "running" for row in rows),
        shared=shared,
        rows=rows,
        labels=labels,
        columns=_COLUMNS,
        headings={name: COLUMNS[name].heading for name in _COLUMNS},
        numeric=NUMERIC,
        value=value_of,
        settings={row.id: () for row in rows},
        sparks={
            row.id: sparkline_points(sparkline(history, row.results, row.ended_at)) for row in rows
        },
        changed=[(name, [_shown(row, name) for row in rows]) for name in names],
        implied=_implied(rows, names),
        packages=_packages(history, rows),
        evaluations=compared(history, rows, labels),
        best=_best(rows, names),
        charts=charts,
        more=num_left_out,
        plots=_plots(rows, names, labels),
        completions=completions,
        num_prompts=num_prompts,
        start=start,
        per_page=_PROMPTS,
        **context,
    )


def _rows(history: History, ids: Sequence[str]) -> list[RunRow]:
    """Returns the chosen rows; a sweep is replaced by its points."""
    rows: dict[str, RunRow] = {}
    for each in ids:
        row = run_row(history, each)
        points: list[RunRow] = []
        if row.node is None and row.workflow.rpartition(".")[2] == "sweep":
            page = run_rows(history, RunQuery(text=row.id, limit=None, sort="started"))
            points = [one for one in page.items if one.run == row.run and one.node is not None]
        rows |= {one.id: one for one in points or [row]}
    return list(rows.values())


def _labels(rows: Sequence[RunRow]) -> dict[str, str]:
    """Returns a short unique name of each row: the given one, the point's settings, or the id."""
    labels = {
        row.id: row.labels.name or (point_label(row.point) if row.point else row.id) for row in rows
    }
    uses = list(labels.values())
    return {
        row.id: labels[row.id]
        if uses.count(labels[row.id]) == 1
        else f"{labels[row.id]} ({row.id})"
        for row in rows
    }


def _shown(row: RunRow, name: str) -> str:
    value = setting_value(row.settings, name)
    return "not set" if value in (MISSING, None) else str(value)


def _implied(rows: Sequence[RunRow], names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Returns settings that differ since a kind, a backend or a section differs."""
    everything = sorted({name for row in rows for name in row.settings})
    return [
        (name, [_shown(row, name) for row in rows])
        for name in everything
        if name not in names and len({repr(row.settings.get(name, MISSING)) for row in rows}) > 1
    ]


def _packages(history: History, rows: Sequence[RunRow]) -> list[tuple[str, list[str]]]:
    versions = [history.execution(row.run).packages for row in rows]
    changed = {each.field for one in versions[1:] for each in differences(versions[0], one)}
    return [(name, [each.get(name, NONE) for each in versions]) for name in sorted(changed)]


def _best(rows: Sequence[RunRow], names: Sequence[str]) -> str:
    """Returns the verdict of the paired test over seeds; empty without seeds."""
    measured = [row for row in rows if row.results.after is not None]
    if len(measured) < 3 or "seed" not in names:
        return ""
    points = [
        (
            {name: row.settings.get(name) for name in names},
            row.results.after.value if row.results.after else None,
        )
        for row in measured
    ]
    return summarize(points, apart="seed", confidence=0.95).verdict


def _overlaid(
    history: History, rows: Sequence[RunRow], labels: Mapping[str, str], text: str, fold: str
) -> tuple[list[Chart], int]:
    """Returns plots of the metrics by stage, and the number of those left out."""
    stages = [
        {
            stage.task: [n for n in stage.nodes if row.node is None or n.point == row.point]
            for stage in curves.stages(history, row.run, text=text)
        }
        for row in rows
    ]
    names: dict[str, set[str]] = {}
    for row in {row.run: row for row in rows}.values():
        for stage in curves.stages(history, row.run, text=text):
            names.setdefault(stage.task, set()).update(stage.names)
    lines = _lines(rows, labels, fold)
    plots: list[Chart] = []
    left_out = 0
    for task, found in names.items():
        ordered = curves.ordered(found)
        shown = ordered[: curves.SHOWN]
        left_out += len(ordered) - len(shown)
        by_row = {
            row.id: curves.series(history, tasks[task], shown) if tasks.get(task) else {}
            for row, tasks in zip(rows, stages, strict=True)
        }
        for name in shown:
            entries: list[tuple[str, int, list[Points]]] = []
            for color, (label, members) in enumerate(lines):
                several = [s for row in members for s in by_row[row.id].get(name, ())]
                if len(members) == 1 and len(several) > 1:
                    entries += [(f"{label} {s.label}".strip(), color, [s.points]) for s in several]
                else:
                    entries.append((label, color, [s.points for s in several]))
            plots.append(overlay(f"{task.rpartition('.')[2]}: {name}", entries))
    return plots, left_out


def _lines(
    rows: Sequence[RunRow], labels: Mapping[str, str], fold: str
) -> list[tuple[str, list[RunRow]]]:
    """Returns label and runs of each line; seeds of the same settings are one line with a band."""
    if fold != "seed":
        return [(labels[row.id], [row]) for row in rows]
    return [
        (
            labels[group.rows[0].id] if len(group.rows) == 1 else group.label,
            list(group.rows),
        )
        for group in grouped(rows, "seed")
    ]


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _plots(
    rows: Sequence[RunRow], names: Sequence[str], labels: Mapping[str, str]
) -> tuple[list[Scatter], Scatter | None]:
    """Returns scatter plots and parallel coordinates of at least three runs with a result."""
    result = "accuracy" if any(row.results.after for row in rows) else "reward"
    measured = [row for row in rows if _is_finite(value_of(row, result))]
    settings = [n for n in names if all(n in row.settings for row in measured)][:_MOST_AXES]
    if len(measured) < 3 or not settings:
        return [], None
    texts = [labels[row.id] for row in measured]
    results = [float(value_of(row, result)) for row in measured]
    values = {name: [row.settings[name] for row in measured] for name in settings}
    scatters = [scatter(f"{result} by {n}", texts, values[n], results) for n in settings[:4]]
    return scatters, parallel(texts, {**values, result: results})
