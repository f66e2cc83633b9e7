"""Comparison of two executions."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from nemo_rl_core.history.differences import differences
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import Execution
from nemo_rl_core.ui import curves
from nemo_rl_core.ui.charts import Chart, Series, chart
from nemo_rl_core.ui.evaluations import compared
from nemo_rl_core.ui.pages.parameters import history_of, parameter
from nemo_rl_core.ui.templating import render

_RECENT = 30


def compare(request: Request) -> Response:
    """Config, evaluation and curves of two executions."""
    if request.app.state.source.is_empty():
        text = "This store holds no execution yet. Run a workflow first."
        return render(
            request,
            "message.html",
            section="compare",
            heading="Compare",
            text=text,
            facts=[],
            command="make grpo",
            matches=[],
        )
    history = history_of(request)
    ids = [one.strip() for one in request.query_params.getlist("run") if one.strip()]
    wanted = parameter(request, "metric")
    context: dict[str, Any] = {
        "section": "compare",
        "ids": [*ids, "", ""][:2],
        "metric": wanted,
        "recent": history.executions(limit=_RECENT).items,
        "refused": "" if len(ids) in (0, 2) else f"Choose two executions; {len(ids)} given.",
    }
    if len(ids) != 2:
        return render(request, "compare.html", runs=(), **context)
    before, after = (history.execution(one) for one in ids)
    charts, more = _overlaid(history, (before, after), wanted)
    return render(
        request,
        "compare.html",
        live="running" in (before.state, after.state),
        runs=(before, after),
        changed=differences(before.inputs, after.inputs),
        packages=differences(before.packages, after.packages),
        evaluations=compared(history, before, after),
        charts=charts,
        more=more,
        **context,
    )


def _overlaid(
    history: History, runs: tuple[Execution, Execution], wanted: str
) -> tuple[list[Chart], int]:
    """Charts of the stages that have metrics, both runs in each, and the number left out."""
    found = [{s.task: s for s in curves.stages(history, run.id, wanted=wanted)} for run in runs]
    charts: list[Chart] = []
    more = 0
    for task in dict.fromkeys(task for stages in found for task in stages):
        names = curves.ordered(
            {n for stages in found if task in stages for n in stages[task].names}
        )
        shown = names[: curves.SHOWN]
        more += len(names) - len(shown)
        lines = [
            curves.series(history, stages[task].nodes, shown) if task in stages else {}
            for stages in found
        ]
        for name in shown:
            series = [
                Series(f"{run.id} {one.label}".strip(), one.points, colour)
                for colour, (run, line) in enumerate(zip(runs, lines, strict=True))
                for one in line.get(name) or [Series("", ())]
            ]
            charts.append(chart(f"{task.rpartition('.')[2]}: {name}", series))
    return charts, more
