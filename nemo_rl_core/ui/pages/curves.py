"""The curves of a run: as a page, as JSON for the charts of the page, and as CSV."""

import csv
import dataclasses
import io
import math
from collections.abc import Iterator
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import Execution
from nemo_rl_core.telemetry.alarms import Alarm
from nemo_rl_core.types import VALIDATION_PREFIX
from nemo_rl_core.ui import curves, machine_load
from nemo_rl_core.ui.charts import chart
from nemo_rl_core.ui.curves import StageCurves, Training
from nemo_rl_core.ui.live import run_status
from nemo_rl_core.ui.pages.parameters import history_of, parameter
from nemo_rl_core.ui.text import visible


class Choice:
    """The metrics, axis and part of the steps that the address names."""

    def __init__(self, request: Request) -> None:
        self.text = parameter(request, "metric")
        self.show = [each for each in request.query_params.getlist("show") if each]
        axis = parameter(request, "x")
        self.axis = axis if axis in curves.AXES else "step"
        ends = [parameter(request, name) for name in ("from", "to")]
        is_part = all(end.isdecimal() and len(end) < 16 for end in ends)
        self.between = (int(ends[0]), int(ends[1])) if is_part else None

    def shown(self, stage: StageCurves, every: list[Training]) -> list[str]:
        """Returns the metrics with a chart: the chosen ones, else the first that change."""
        if self.show:
            return [name for name in stage.names if name in self.show]
        return self.all_shown(stage, every)[: 4 * curves.SHOWN if self.text else curves.SHOWN]

    def all_shown(self, stage: StageCurves, every: list[Training]) -> list[str]:
        """Returns the metrics that change and are not drawn into the chart of another one."""
        names = {name for training in every for name in training.curves}
        own_charts = [n for n in stage.names if n in names and not _is_of_another(n, names)]
        return [name for name in own_charts if curves.constant(every, name) is None]


def content(request: Request, run: Execution) -> dict[str, Any]:
    """Returns what the page without JavaScript shows: charts of the shown metrics."""
    history, choice = history_of(request), Choice(request)
    sections = []
    axes, changing, all_charts = set[str](), set[str](), set[str]()
    for stage in curves.stages(history, run.id, text=choice.text):
        axes |= stage.axes
        axis = stage.axis(choice.axis)
        every = curves.trainings(history, stage.nodes, stage.names, axis=axis)
        shown = choice.shown(stage, every)
        borders = [x for each in every for x, _ in each.borders[1:]]
        charts = [
            chart(name, curves.lines(every, name), axis=curves.AXES[axis], borders=borders)
            for name in shown
        ]
        constants = {name: curves.constant(every, name) for name in stage.names}
        changing |= {name for name, value in constants.items() if value is None}
        all_charts |= set(shown)
        sections.append(
            {
                "stage": stage,
                "charts": charts,
                "constants": {n: v for n, v in constants.items() if v is not None},
                "num_hidden": len(choice.all_shown(stage, every)) - len(shown),
            }
        )
    groups: dict[str, list[str]] = {}
    for name in curves.ordered(changing):
        groups.setdefault(curves.group_of(name), []).append(name)
    names_of_nodes = history.metric_names_of(run.id)
    nodes = history.nodes(run.id)
    return {
        "metric": choice.text,
        "choice": choice,
        "axes": curves.AXES,
        "offered_axes": axes,
        "sections": sections,
        "groups": groups,
        "shown": all_charts,
        "machine": machine_load.charts(history, nodes, names_of_nodes, text=choice.text),
        "live_now": run_status(history, run),
    }


def data(request: Request) -> Response:
    """Returns the shown curves of a run as JSON, thinned to at most 512 points per node."""
    run = history_of(request).execution(request.path_params["execution"])
    return JSONResponse(chart_data(request, run))


def chart_data(request: Request, run: Execution) -> dict[str, Any]:
    """Returns what the charts of the page draw."""
    history, choice = history_of(request), Choice(request)
    stages = curves.stages(history, run.id, text=choice.text)
    return {"state": run.state, "stages": [_stage(history, choice, stage) for stage in stages]}


def as_csv(request: Request) -> Response:
    """Returns every value of the chosen metrics as CSV, one line per value."""
    history = history_of(request)
    run = history.execution(request.path_params["execution"])
    chosen = request.query_params.getlist("show")
    stages = curves.stages(history, run.id)
    if not any(name in stage.names for stage in stages for name in chosen):
        raise HTTPException(404, "Name recorded metrics: ?show=reward&show=loss")

    def lines() -> Iterator[str]:
        yield "stage,node,metric,step,value\r\n"
        for stage in stages:
            for node in stage.nodes:
                names = [name for name in chosen if name in stage.names]
                text = io.StringIO()
                writer = csv.writer(text)
                for name, points in history.metrics(node.id, names=names).items():
                    for step, value in points:
                        writer.writerow([visible(node.title), node.id, visible(name), step, value])
                yield text.getvalue()

    headers = {"content-disposition": 'attachment; filename="metrics.csv"'}
    return StreamingResponse(lines(), media_type="text/csv; charset=utf-8", headers=headers)


def _stage(history: History, choice: Choice, stage: StageCurves) -> dict[str, Any]:
    axis = stage.axis(choice.axis)
    complete = curves.trainings(history, stage.nodes, stage.names, axis=axis)
    shown = choice.shown(stage, complete)
    every = complete
    if choice.between is not None and axis == "step":
        read = [name for n in shown for name in (n, VALIDATION_PREFIX + n) if name in stage.names]
        # By training, so that each keeps its color and label if others have no step in the part.
        parts = [
            curves.trainings(history, [n for _, n in each.borders], read, between=choice.between)
            for each in complete
        ]
        every = [
            dataclasses.replace(each, curves=part[0].curves if part else {})
            for each, part in zip(complete, parts, strict=True)
        ]
    alarms = curves.alarms_of(history, stage, axis=axis)
    return {
        "task": visible(stage.task.rpartition(".")[2]),
        "axis": axis,
        "label": curves.AXES[axis],
        "charts": [
            {
                "name": name,
                "title": visible(name),
                "lines": [
                    _line(each, color, name)
                    for color, each in enumerate(every)
                    if name in each.curves
                ],
                "validation": [
                    _line(each, color, VALIDATION_PREFIX + name)
                    for color, each in enumerate(every)
                    if VALIDATION_PREFIX + name in each.curves
                ],
                "alarms": [_mark(each, one) for each, one in alarms if one.metric == name],
            }
            for name in shown
        ],
        "borders": [
            {"x": x, "label": visible(node.title)}
            for each in complete
            for x, node in each.borders[1:]
        ],
    }


def _line(training: Training, color: int, name: str) -> dict[str, Any]:
    """Returns the points of a line, and the mean of each bucket if it has several values."""
    buckets = training.curves[name]
    points = [point for bucket in buckets for point in bucket.points]
    means = None
    if any(bucket.num_values > 1 for bucket in buckets):
        finite = [b for b in buckets if b.num_values > b.num_missing]
        means = {
            "x": [(b.low.x + b.high.x) / 2 for b in finite],
            "y": [b.total / (b.num_values - b.num_missing) for b in finite],
            "n": [b.num_values - b.num_missing for b in finite],
        }
    return {
        "label": visible(training.label),
        "color": color,
        "x": [point.x for point in points],
        "y": [point.value if math.isfinite(point.value) else None for point in points],
        "means": means,
    }


def _mark(training: Training, alarm: Alarm) -> dict[str, Any]:
    """Returns the position of an alarm on the axis of its curve."""
    envelope = training.curves[alarm.metric]
    points = [p for b in envelope for p in (*b.points, b.first_missing) if p is not None]
    points.sort(key=lambda each: each.step)
    at = [p.x for p in points if alarm.since is not None and alarm.since <= p.step]
    until = [p.x for p in points if alarm.until is not None and p.step <= alarm.until]
    return {
        "name": alarm.rule.name,
        "condition": alarm.rule.condition,
        "from": at[0] if at else points[-1].x,
        "to": until[-1] if until else points[0].x,
        "isOver": alarm.is_over,
    }


def _is_of_another(name: str, names: set[str]) -> bool:
    """Returns whether a metric of validation is drawn into the chart of training."""
    return name.startswith(VALIDATION_PREFIX) and name.removeprefix(VALIDATION_PREFIX) in names
