"""The metrics of a run: one line per training loop, with all of its iterations."""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nemo_rl_core.history.envelopes import MAX_BUCKETS, Bucket, CurvePoint, Envelope
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import NUM_TOKENS, PROGRESS, RUN_SECONDS, Node, point_label
from nemo_rl_core.telemetry.alarms import RULES, Alarm, alarms
from nemo_rl_core.types import VALIDATION_PREFIX
from nemo_rl_core.ui import machine_load
from nemo_rl_core.ui.charts import Chart, Series, chart

SHOWN = 12
AXES = {
    "step": "steps",
    "time": "seconds of the run, without cached stages",
    "tokens": "tokens trained on",
}
"""Names of the axes and their labels."""
_METRIC_OF_AXIS = {"step": "", "time": RUN_SECONDS, "tokens": NUM_TOKENS}
_GLOBAL_STEP = "global_step"
_WATCHED = [metric for rule in RULES for metric in rule.metrics]
_MOST_BUCKETS, _FEWEST_BUCKETS = 2048, 16
"""Number of buckets of all nodes in one chart, and the minimum of each line."""
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Result": ("reward", "accuracy", "loss", VALIDATION_PREFIX, "reward_", "turn_reward"),
    "Policy": (
        "kl",
        "policy_kl",
        "approx_entropy",
        "entropy",
        "clip_fraction",
        "ratio_",
        "importance_",
        "advantage",
        "margin",
        "value_",
    ),
    "Completions": (
        "completion_length",
        "truncated_fraction",
        "zero_variance_fraction",
        "failed_fraction",
        "num_turns",
        "num_failed_rollouts",
    ),
    "Optimizer": ("grad_norm", "learning_rate", "num_valid_tokens"),
    "Speed": ("timings/tokens_per_second", "timings/"),
    "Engine and faults": ("kl_generation_trainer", "token_mult_prob_error", "sampling_", "num_"),
}
"""Beginnings of metrics' names by meaning, in the order in which they are shown."""
OTHER = "Other"


@dataclass(frozen=True)
class StageCurves:
    """The metrics of all calls of one task.

    Attributes:
        axes: Names of the axes on which each value has a position.
    """

    task: str
    nodes: tuple[Node, ...]
    names: tuple[str, ...]
    axes: frozenset[str] = frozenset({"step"})

    def axis(self, chosen: str) -> str:
        """Returns the chosen axis if the stage has it, else that of steps."""
        return chosen if chosen in self.axes else "step"


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
        StageCurves(task, tuple(nodes), chosen[task], _axes(nodes, measured))
        for task, nodes in by_task.items()
        if chosen[task]
    ]


def _axes(nodes: Sequence[Node], measured: Mapping[int, Sequence[str]]) -> frozenset[str]:
    return frozenset(
        axis
        for axis, metric in _METRIC_OF_AXIS.items()
        for node in nodes
        if not metric or (metric in measured[node.id] and _is_on(axis, node))
    )


def _is_on(axis: str, node: Node) -> bool:
    """Returns whether a node has positions on an axis; a cache hit took no seconds of the run."""
    return axis != "time" or node.cached_from is None


def ordered(names: Iterable[str], text: str = "") -> tuple[str, ...]:
    """Sorts names of metrics by meaning, as in `GROUPS`, then alphabetically.

    Leaves out the step and its progress, and the machine's metrics, which `machine_load` shows.
    """
    hidden = (machine_load.PREFIX, PROGRESS)
    measured = [n for n in names if n != _GLOBAL_STEP and not n.startswith(hidden)]
    kept = [n for n in measured if text.casefold() in n.casefold()]
    return tuple(sorted(kept, key=lambda name: (_rank(name)[1:], name)))


def group_of(name: str) -> str:
    """Returns the group of a metric.

    Example:
        >>> group_of("kl"), group_of("kl_generation_trainer"), group_of("my_metric")
        ('Policy', 'Engine and faults', 'Other')
    """
    return _rank(name)[0]


@functools.cache
def _rank(name: str) -> tuple[str, int, int]:
    """Returns the group with the longest beginning of the name, and the position in it."""
    matches = [
        (len(beginning), group, number, position)
        for number, (group, beginnings) in enumerate(GROUPS.items())
        for position, beginning in enumerate(beginnings)
        if name.startswith(beginning)
    ]
    _, group, number, position = max(matches, default=(0, OTHER, len(GROUPS), 0))
    return group, number, position


@dataclass
class Training:
    """Calls of a task with consecutive steps, such as the iterations of a stage.

    Attributes:
        borders: Position on the axis at which each call begins, and the call.
    """

    key: tuple[int | None, str]
    label: str
    last: float = -math.inf
    offset: float = 0.0
    curves: dict[str, Envelope] = field(default_factory=dict)
    borders: list[tuple[float, Node]] = field(default_factory=list)


def trainings(
    history: History,
    nodes: Sequence[Node],
    names: Sequence[str],
    *,
    axis: str = "step",
    between: tuple[int, int] | None = None,
    most: int | None = None,
) -> list[Training]:
    """Returns the training loops of a task with their curves.

    Iterations of a stage are joined to one line, by the step of the full run if it is known. Two
    training loops of one run, such as points of a sweep or two calls of `train_sft`, are two lines.

    Args:
        most: Maximum number of buckets of a node; by default fewer the more nodes there are.
    """
    every: list[Training] = []
    most = most or _buckets_per_node(nodes)
    for node in nodes:
        if not _is_on(axis, node):
            continue
        measured = _curves(history, node.id, names, axis=axis, between=between, most=most)
        if not measured:
            continue
        label = point_label(node.point)
        key = (node.parent, label)
        first = min(envelope[0].low.x for envelope in measured.values())
        begin, end = (
            (first, max(envelope[-1].high.x for envelope in measured.values()))
            if axis == "step"
            else (
                min(envelope[0].begin for envelope in measured.values()),
                max(envelope[-1].high.step for envelope in measured.values()),
            )
        )
        matching = [each for each in every if each.key == key]
        if not matching or begin <= matching[-1].last:
            matching = [Training(key, label)]
            every += matching
        training = matching[-1]
        training.last = end
        if training.borders and axis == "tokens":  # each node counts from 0
            training.offset = max(envelope[-1].high.x for envelope in training.curves.values())
        training.borders.append((first + training.offset, node))
        for name, envelope in measured.items():
            moved = [each.moved(training.offset) for each in envelope] if training.offset else None
            training.curves.setdefault(name, []).extend(moved or envelope)
    labels = _unique_labels([each.label for each in every])
    for training, label in zip(every, labels, strict=True):
        training.label = label
    return every


def _buckets_per_node(nodes: Sequence[Node]) -> int:
    """Returns a number from 2 to `MAX_BUCKETS`."""
    num_lines = len({(node.parent, point_label(node.point)) for node in nodes})
    fewest = _FEWEST_BUCKETS * num_lines // max(1, len(nodes))
    return max(2, fewest, min(MAX_BUCKETS, _MOST_BUCKETS // max(1, len(nodes))))


def series(
    history: History, nodes: Sequence[Node], names: Sequence[str], *, axis: str = "step"
) -> dict[str, list[Series]]:
    """Returns the lines of each metric, one line per training loop; see `trainings`."""
    every = trainings(history, nodes, names, axis=axis)
    return {name: lines(every, name) for name in names if any(name in t.curves for t in every)}


def lines(every: Sequence[Training], name: str) -> list[Series]:
    """Returns the lines of one metric."""
    return [
        Series(each.label, [(p.x, p.value) for b in each.curves[name] for p in b.points], color)
        for color, each in enumerate(every)
        if name in each.curves
    ]


def constant(every: Sequence[Training], name: str) -> float | None:
    """Returns the value of a metric that has the same one at several steps, else None."""
    buckets = [bucket for each in every for bucket in each.curves.get(name, ())]
    values = {value for each in buckets for value in (each.low.value, each.high.value)}
    is_constant = len(values) == 1 and sum(each.num_values for each in buckets) > 1
    return values.pop() if is_constant and not any(each.num_missing for each in buckets) else None


def alarms_of(
    history: History, stage: StageCurves, *, axis: str = "step"
) -> list[tuple[Training, Alarm]]:
    """Returns the alarms of each training of a stage."""
    names = [name for name in _WATCHED if name in stage.names]
    marked = []
    for coarse in trainings(history, stage.nodes, names, axis=axis):
        suspects = [name for name in names if _may_alarm(name, coarse.curves.get(name, []))]
        if not suspects:
            continue
        # In full detail: of few buckets, several steps in a row that are wrong may be missing.
        nodes = [node for _, node in coarse.borders]
        for each in trainings(history, nodes, suspects, axis=axis, most=MAX_BUCKETS):
            each.label = coarse.label
            measured = {
                name: [(p.step, p.value) for b in envelope for p in _with_missing(b)]
                for name, envelope in each.curves.items()
            }
            marked += [(each, alarm) for alarm in alarms(measured)]
    return marked


def _may_alarm(name: str, envelope: Envelope) -> bool:
    """Whether some value of a thinned curve breaks a rule; its first value is in `firsts`."""
    ends = [(b.low.value, b.high.value) for b in envelope if math.isfinite(b.low.value)]
    values = [value for pair in ends for value in pair]
    firsts = values[:2] or [math.nan]
    values += [math.nan] * any(b.num_missing for b in envelope)
    return any(
        rule.is_wrong(value, first)
        for rule in RULES
        if name in rule.metrics
        for first in firsts
        for value in values
    )


def _with_missing(bucket: Bucket) -> list[CurvePoint]:
    missing = bucket.first_missing
    if missing is None or missing in bucket.points:
        return bucket.points
    return sorted([missing, *bucket.points], key=lambda each: each.step)


def _unique_labels(labels: Sequence[str]) -> list[str]:
    """Numbers labels that occur more than once, such as those of two calls of a stage."""
    uses, seen = Counter(labels), Counter[str]()
    unique: list[str] = []
    for label in labels:
        seen[label] += 1
        number = f"call {seen[label]}" if uses[label] > 1 else ""
        unique.append(", ".join(part for part in (label, number) if part))
    return unique


def _curves(
    history: History,
    node: int,
    names: Sequence[str],
    *,
    axis: str,
    between: tuple[int, int] | None,
    most: int,
) -> dict[str, Envelope]:
    metric = _METRIC_OF_AXIS[axis]
    if axis == "step":
        # Steps are numbered over the full run, except in records of early versions.
        step, at = history.last_value(node, _GLOBAL_STEP) or (0, 0.0)
        metric = _GLOBAL_STEP if step != at else ""
    measured = history.envelopes(node, list(names), axis=metric, between=between, most=most)
    kept = {
        name: [b for b in envelope if math.isfinite(b.low.x) and math.isfinite(b.high.x)]
        for name, envelope in measured.items()
    }
    return {name: envelope for name, envelope in kept.items() if envelope}


def charts(named: Mapping[str, Sequence[Series]], *, axis: str = "steps") -> list[Chart]:
    """Returns one chart per metric."""
    return [chart(name, each, axis=axis) for name, each in named.items()]
