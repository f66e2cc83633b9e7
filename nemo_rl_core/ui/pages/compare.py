"""Comparison of two executions."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from nemo_rl_core.errors import NemoRLError
from nemo_rl_core.history.differences import differences
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import ArtifactRow, Execution, point_label
from nemo_rl_core.ui import curves
from nemo_rl_core.ui.ancestry import base_stage
from nemo_rl_core.ui.charts import Chart, Series, chart
from nemo_rl_core.ui.pages.parameters import history_of, parameter
from nemo_rl_core.ui.templating import render, render_message

if TYPE_CHECKING:
    from nemo_rl_core.evals.comparison import Comparison

_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Compared:
    """An evaluation that both runs have.

    Attributes:
        compared: The comparison; None if the two cannot be compared.
        refused: The reason why they cannot be compared; empty if they can.
    """

    name: str
    artifacts: tuple[str, str]
    compared: "Comparison | None" = None
    refused: str = ""


def compared(history: History, before: Execution, after: Execution) -> list[Compared]:
    """Compares evaluations of the same stage; from each run, the one with the most steps.

    Evaluations of a sweep's points are compared with those of the same point.
    """
    old, new = _evaluations(history, before), _evaluations(history, after)
    return [_compare(name, old[name], new[name]) for name in old if name in new]


def _evaluations(history: History, run: Execution) -> dict[str, ArtifactRow]:
    evaluations: dict[str, ArtifactRow] = {}
    points = history.points_of(run.id)
    for one in history.artifacts_of(run.id):
        parents = one.manifest.get("parents", ())
        if one.kind != "evaluation" or not (Path(one.path) / "rows.parquet").is_file():
            continue
        models = [p["stage"] for p in parents if p["kind"] in ("checkpoint", "model")]
        name = f"{base_stage(one.stage)} of {base_stage(models[0]) if models else 'a model'}"
        if one.id in points:
            name += f" ({point_label(points[one.id])})"
        if name not in evaluations or (one.step or 0) >= (evaluations[name].step or 0):
            evaluations[name] = one
    return evaluations


def _compare(name: str, old: ArtifactRow, new: ArtifactRow) -> Compared:
    ids = (old.id, new.id)
    try:
        return Compared(
            name, ids, _measured(old.path, old.content_hash, new.path, new.content_hash)
        )
    except NemoRLError as error:
        return Compared(name, ids, refused=str(error))
    except (OSError, KeyError, ValueError) as error:  # pyarrow's errors are ValueErrors
        return Compared(name, ids, refused=f"The rows of one of them cannot be read: {error}")


@functools.lru_cache(maxsize=64)
def _measured(old: str, _old_hash: str, new: str, _new_hash: str) -> "Comparison":
    """Compares two evaluations; artifacts never change, so hashes are the cache's key."""
    from nemo_rl_core.evals.rows import compare_files

    before, after = (Path(folder) / "rows.parquet" for folder in (old, new))
    return compare_files(before, after, confidence=_CONFIDENCE)


_RECENT = 30


def compare(request: Request) -> Response:
    """Compares config, evaluations and curves of two executions."""
    if request.app.state.source.is_empty():
        text = "This store has no executions yet. Run a workflow first."
        return render_message(request, "Compare", text, section="compare", command="make grpo")
    history = history_of(request)
    ids = [one.strip() for one in request.query_params.getlist("run") if one.strip()]
    metric_filter = parameter(request, "metric")
    context: dict[str, Any] = {
        "section": "compare",
        "ids": [*ids, "", ""][:2],
        "metric": metric_filter,
        "recent": history.executions(limit=_RECENT).items,
        "refused": "" if len(ids) in (0, 2) else f"Choose two executions; {len(ids)} given.",
    }
    if len(ids) != 2:
        return render(request, "compare.html", runs=(), **context)
    before, after = (history.execution(one) for one in ids)
    charts, num_left_out = _overlaid(history, (before, after), metric_filter)
    return render(
        request,
        "compare.html",
        live="running" in (before.state, after.state),
        runs=(before, after),
        changed=differences(before.inputs, after.inputs),
        packages=differences(before.packages, after.packages),
        evaluations=compared(history, before, after),
        charts=charts,
        more=num_left_out,
        **context,
    )


def _overlaid(
    history: History, runs: tuple[Execution, Execution], metric_filter: str
) -> tuple[list[Chart], int]:
    """Returns charts of metrics of both runs by stage, and the number of those left out."""
    stages_of_runs = [
        {s.task: s for s in curves.stages(history, run.id, text=metric_filter)} for run in runs
    ]
    charts: list[Chart] = []
    num_left_out = 0
    for task in dict.fromkeys(task for stages in stages_of_runs for task in stages):
        names = curves.ordered(
            {n for stages in stages_of_runs if task in stages for n in stages[task].names}
        )
        shown = names[: curves.SHOWN]
        num_left_out += len(names) - len(shown)
        lines = [
            curves.series(history, stages[task].nodes, shown) if task in stages else {}
            for stages in stages_of_runs
        ]
        for name in shown:
            series = [
                Series(f"{run.id} {one.label}".strip(), one.points, color)
                for color, (run, line) in enumerate(zip(runs, lines, strict=True))
                for one in line.get(name) or [Series("", ())]
            ]
            charts.append(chart(f"{task.rpartition('.')[2]}: {name}", series))
    return charts, num_left_out
