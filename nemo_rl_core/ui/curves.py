"""The metrics of a run; those of a stage's iterations are joined to one line."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import Node
from nemo_rl_core.ui import machine_load
from nemo_rl_core.ui.charts import Chart, Point, Series, chart, thinned

SHOWN = 12
_FIRST = (
    "reward",
    "accuracy",
    "loss",
    "grad_norm",
    "kl",
    "policy_kl",
    "completion_length",
    "truncated_fraction",
    "learning_rate",
    "timings/tokens_per_second",
)
_GLOBAL_STEP = "global_step"


@dataclass(frozen=True)
class StageCurves:
    """The metrics of all calls of one task.

    Attributes:
        task: Full name of the task.
        nodes: The calls, in order.
        names: Names of the metrics, the most used ones first.
    """

    task: str
    nodes: tuple[Node, ...]
    names: tuple[str, ...]


def stages(history: History, execution: str, *, wanted: str = "") -> list[StageCurves]:
    """The tasks of a run that have metrics.

    Args:
        history: The database that holds them.
        execution: Id of the run.
        wanted: Only metrics whose name contains this; case-insensitive.
    """
    by_task: dict[str, list[Node]] = {}
    names: dict[str, set[str]] = {}
    measured = history.metric_names_of(execution)
    for node in history.nodes(execution):
        if node.kind == "task" and node.id in measured:
            by_task.setdefault(node.task, []).append(node)
            names.setdefault(node.task, set()).update(measured[node.id])
    chosen = {task: ordered(names[task], wanted) for task in by_task}
    return [
        StageCurves(task, tuple(nodes), chosen[task])
        for task, nodes in by_task.items()
        if chosen[task]
    ]


def ordered(names: Iterable[str], wanted: str = "") -> tuple[str, ...]:
    """Sorts names of metrics: the usual ones first, then alphabetically.

    Leaves out the step, and the machine's metrics, which `machine_load` shows.
    """
    measured = [n for n in names if n != _GLOBAL_STEP and not n.startswith(machine_load.PREFIX)]
    kept = [n for n in measured if wanted.casefold() in n.casefold()]
    return tuple(sorted(kept, key=lambda n: (_FIRST.index(n) if n in _FIRST else len(_FIRST), n)))


def lines(history: History, nodes: Sequence[Node], names: Sequence[str]) -> dict[str, list[Point]]:
    """One line per metric over all nodes, by the step of the whole training where it is known."""
    found: dict[str, dict[float, float]] = {name: {} for name in names}
    for node in nodes:
        # Finished nodes are read once, so that a page that reloads while a later iteration runs
        # reads only the running node.
        read = _points if node.ended_at is None else _points_once
        for name, points in read(history, node.id, node.started_at, tuple(names)).items():
            found[name] |= dict(points)
    return {name: sorted(points.items()) for name, points in found.items() if points}


def _points(
    history: History, node: int, _started_at: float, names: tuple[str, ...]
) -> dict[str, list[Point]]:
    """A node's curves. The start time is in the cache key, as ids of removed nodes are reused."""
    curves = history.metrics(node, names=[*names, _GLOBAL_STEP])
    steps = {step: at for step, at in curves.get(_GLOBAL_STEP, ()) if math.isfinite(at)}
    return {
        name: thinned([(steps.get(step, step), value) for step, value in curves[name]])
        for name in names
        if name in curves
    }


_points_once = functools.lru_cache(maxsize=256)(_points)


def charts(named: Mapping[str, Sequence[Point]]) -> list[Chart]:
    """One chart per metric."""
    return [chart(name, [Series("", points)]) for name, points in named.items()]
