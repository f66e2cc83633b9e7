"""The metrics of a run: one line per training loop, with all of its iterations."""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import Node, point_label
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
    """The metrics of all calls of one task."""

    task: str
    nodes: tuple[Node, ...]
    names: tuple[str, ...]


def stages(history: History, execution: str, *, text: str = "") -> list[StageCurves]:
    """Returns the tasks of a run that have metrics."""
    by_task: dict[str, list[Node]] = {}
    names: dict[str, set[str]] = {}
    measured = history.metric_names_of(execution)
    for node in history.nodes(execution):
        if node.kind == "task" and node.id in measured:
            by_task.setdefault(node.task, []).append(node)
            names.setdefault(node.task, set()).update(measured[node.id])
    chosen = {task: ordered(names[task], text) for task in by_task}
    return [
        StageCurves(task, tuple(nodes), chosen[task])
        for task, nodes in by_task.items()
        if chosen[task]
    ]


def ordered(names: Iterable[str], text: str = "") -> tuple[str, ...]:
    """Sorts names of metrics: those of `_FIRST` in its order, then the rest alphabetically.

    Leaves out the step and the machine's metrics, which `machine_load` shows.
    """
    measured = [n for n in names if n != _GLOBAL_STEP and not n.startswith(machine_load.PREFIX)]
    kept = [n for n in measured if text.casefold() in n.casefold()]
    return tuple(sorted(kept, key=lambda n: (_FIRST.index(n) if n in _FIRST else len(_FIRST), n)))


@dataclass
class _Training:
    """Calls of a task with consecutive steps, such as the iterations of a stage."""

    key: tuple[int | None, str]
    label: str
    last: float = -math.inf
    points: dict[str, list[Point]] = field(default_factory=dict)


def series(
    history: History, nodes: Sequence[Node], names: Sequence[str]
) -> dict[str, list[Series]]:
    """Returns the lines of each metric, one line per training loop.

    Iterations of a stage are joined to one line, by the step of the full run if it is known. Two
    training loops of one run, such as points of a sweep or two calls of `train_sft`, are two lines.
    """
    trainings: list[_Training] = []
    for node in nodes:
        # Finished nodes are read once, so that a page that reloads during a later iteration reads
        # only the running node.
        read = _points if node.ended_at is None else _points_once
        measured = read(history, node.id, node.started_at, tuple(names))
        if not measured:
            continue
        label = point_label(node.point)
        key = (node.parent, label)
        first = min(points[0][0] for points in measured.values())
        matching = [each for each in trainings if each.key == key]
        if not matching or first <= matching[-1].last:
            matching = [_Training(key, label)]
            trainings += matching
        matching[-1].last = max(points[-1][0] for points in measured.values())
        for name, points in measured.items():
            matching[-1].points.setdefault(name, []).extend(points)
    labels = _unique_labels([each.label for each in trainings])
    return {
        name: [
            Series(label, each.points[name], color)
            for color, (label, each) in enumerate(zip(labels, trainings, strict=True))
            if name in each.points
        ]
        for name in names
        if any(name in each.points for each in trainings)
    }


def _unique_labels(labels: Sequence[str]) -> list[str]:
    """Numbers labels that occur more than once, such as those of two calls of a stage."""
    uses, seen = Counter(labels), Counter[str]()
    unique: list[str] = []
    for label in labels:
        seen[label] += 1
        number = f"call {seen[label]}" if uses[label] > 1 else ""
        unique.append(", ".join(part for part in (label, number) if part))
    return unique


def _points(
    history: History, node: int, _started_at: float, names: tuple[str, ...]
) -> dict[str, list[Point]]:
    """Returns a node's curves. The start time is for the cache: ids of removed nodes are reused."""
    curves = history.metrics(node, names=[*names, _GLOBAL_STEP])
    steps = {step: at for step, at in curves.get(_GLOBAL_STEP, ()) if math.isfinite(at)}
    return {
        name: thinned([(steps.get(step, step), value) for step, value in curves[name]])
        for name in names
        if name in curves
    }


_points_once = functools.lru_cache(maxsize=256)(_points)


def charts(named: Mapping[str, Sequence[Series]]) -> list[Chart]:
    """Returns one chart per metric."""
    return [chart(name, each) for name, each in named.items()]
