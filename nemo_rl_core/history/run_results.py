"""Results of a run or of a point of a sweep, from its nodes, evaluations and metrics."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

from nemo_rl_core.history.envelopes import damaged_metric
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import State
from nemo_rl_core.history.rows import read_row

REWARD_STEPS = 10
"""Number of last steps whose mean is the reward and the loss of a row."""
SPARK_POINTS = 40


class Accuracy(NamedTuple):
    """A measured accuracy with the bounds of its interval."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class RunResults:
    """Results of a run or of a point.

    Attributes:
        before: Accuracy of the first evaluation; None with fewer than two of the same stage.
        after: Accuracy of the last evaluation.
        reward: Mean of the last `REWARD_STEPS` steps of the last training, as is `loss`; NaN if the
            last step has no finite value.
        verdict: "promoted" or "not promoted"; empty without a promotion.
        why: The sentence of the promotion.
        step: Last recorded step of the last training.
        num_steps: Its number of steps by the settings; None if unknown.
        tokens: Tokens of all stages that were not cached, as are `gpu_hours` and `money`.
        trainings: Ids of the nodes with the metrics of the last training, in order.
        stage: Name of its stage.
        metric: The metric of the sparkline: `reward`, else `loss`.
    """

    before: Accuracy | None = None
    after: Accuracy | None = None
    reward: float | None = None
    loss: float | None = None
    verdict: str = ""
    why: str = ""
    step: int | None = None
    num_steps: int | None = None
    tokens: int | None = None
    gpu_hours: float | None = None
    money: float | None = None
    currency: str = ""
    stages: int = 0
    cached: int = 0
    trainings: tuple[int, ...] = ()
    stage: str = ""
    metric: str = ""


NO_RESULTS = RunResults()


def gain(results: RunResults) -> float | None:
    """Returns the accuracy after minus that before."""
    if results.before is None or results.after is None:
        return None
    return results.after.value - results.before.value


class _Stage(NamedTuple):
    id: int
    task: str
    kind: str
    state: State
    cost: dict[str, float | str | None]
    summary: str
    measured: int
    reward_step: Any  # an integer or None unless the table `metrics` is damaged
    loss_step: Any


_STAGES = """
SELECT id, task, kind, state, cost, summary, coalesce(cached_from, id) AS measured,
  (SELECT max(step) FROM metrics WHERE node = coalesce(cached_from, nodes.id) AND name = 'reward')
    AS reward_step,
  (SELECT max(step) FROM metrics WHERE node = coalesce(cached_from, nodes.id) AND name = 'loss')
    AS loss_step
FROM nodes WHERE execution = ?
"""
_OF_POINT = " AND point = (SELECT point FROM nodes WHERE id = ?)"


class _Evaluation(NamedTuple):
    id: str
    stage: str
    manifest: dict[str, Any]


_EVALUATIONS = """
SELECT artifacts.id, stage, manifest FROM nodes JOIN node_outputs ON node_outputs.node = nodes.id
JOIN artifacts ON artifacts.id = node_outputs.artifact
WHERE nodes.execution = ? AND artifacts.kind = 'evaluation'
"""


def read_results(
    history: History, run: str, node: int | None, _ended_at: float | None
) -> RunResults:
    """Returns the results; those of a sweep do not include the accuracies of its points."""
    store = history.store
    scope, values = (_OF_POINT, (run, node)) if node is not None else ("", (run,))
    rows = history.select(f"{_STAGES}{scope} ORDER BY id", values)
    stages = [read_row(_Stage, each, table="nodes", key="id", store=store) for each in rows]
    outside = "" if node is not None else " AND point = '{}'"
    evaluated = history.select(f"{_EVALUATIONS}{scope}{outside} ORDER BY nodes.id", values)
    evaluations = [
        read_row(_Evaluation, each, table="artifacts", key="id", store=store) for each in evaluated
    ]
    before, after = _accuracies(evaluations)
    ran = [each.cost for each in stages if each.state != "cached"]
    decisions = [each.summary for each in stages if each.task.endswith(".promote") and each.summary]
    tasks = [each for each in stages if each.kind == "task"]
    return replace(
        _trained(history, [] if _is_sweep(history, run, node) else tasks),
        before=before,
        after=after,
        verdict=_verdict(decisions[-1]) if decisions else "",
        why=decisions[-1] if decisions else "",
        tokens=int(_total(ran, "tokens") or 0) or None,
        gpu_hours=(_total(ran, "gpu_seconds") or 0) / 3600 or None,
        money=_total(ran, "money"),
        currency=next((str(cost["currency"]) for cost in ran if cost.get("currency")), ""),
        stages=len(tasks),
        cached=sum(each.state == "cached" for each in stages),
    )


read_results_once = functools.lru_cache(maxsize=16384)(read_results)
"""`read_results` for runs that have ended, which do not change."""


def _is_sweep(history: History, run: str, node: int | None) -> bool:
    query = "SELECT 1 FROM nodes WHERE execution = ? AND point <> '{}' LIMIT 1"
    return node is None and bool(history.select(query, (run,)))


def _accuracies(evaluations: Sequence[_Evaluation]) -> tuple[Accuracy | None, Accuracy | None]:
    """Returns the first and the last accuracy of the stage of the last evaluation."""
    measured: dict[str, tuple[str, Accuracy]] = {}
    for each in evaluations:
        figures = each.manifest.get("figures")
        figures = figures if isinstance(figures, dict) else {}
        name = "greedy_accuracy" if "greedy_accuracy" in figures else "accuracy"
        value, low, high = (figures.get(f"{name}{end}") for end in ("", "_low", "_high"))
        if isinstance(value, int | float) and math.isfinite(value):
            measured[each.id] = (each.stage.partition(" ")[0], Accuracy(value, low, high))
    if not measured:
        return None, None
    last_stage, after = list(measured.values())[-1]
    same = [accuracy for stage, accuracy in measured.values() if stage == last_stage]
    return (same[0] if len(same) > 1 else None), after


def _verdict(summary: str) -> str:
    return "not promoted" if summary.startswith("NOT promoted") else "promoted"


def _total(costs: Sequence[Mapping[str, float | str | None]], name: str) -> float | None:
    values = [cost.get(name) for cost in costs]
    numbers = [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]
    return sum(numbers) if numbers else None


def _trained(history: History, tasks: Sequence[_Stage]) -> RunResults:
    """Returns reward, loss and step of the last training."""
    for each in tasks:
        for name, step in (("reward", each.reward_step), ("loss", each.loss_step)):
            if not isinstance(step, int | None):
                raise damaged_metric(name, step)
    trained = [each for each in tasks if each.reward_step is not None or each.loss_step is not None]
    if not trained:
        return NO_RESULTS
    last = trained[-1]
    metric = "reward" if last.reward_step is not None else "loss"
    return RunResults(
        reward=_last_mean(history, last.measured, "reward"),
        loss=_last_mean(history, last.measured, "loss"),
        step=last.reward_step if metric == "reward" else last.loss_step,
        trainings=tuple(each.measured for each in trained if each.task == last.task),
        stage=last.task.rpartition(".")[2],
        metric=metric,
    )


def _last_mean(history: History, node: int, name: str) -> float | None:
    query = "SELECT value FROM metrics WHERE node = ? AND name = ? ORDER BY step DESC LIMIT ?"
    rows = history.select(query, (node, name, REWARD_STEPS))
    values = [math.nan if row["value"] is None else float(row["value"]) for row in rows]
    if values and not math.isfinite(values[0]):
        return math.nan  # the training has diverged
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else None


def sparkline(history: History, results: RunResults, ended_at: float | None) -> list[float]:
    """Returns up to `SPARK_POINTS` values of the metric, evenly spaced over the training."""
    if not results.trainings:
        return []
    read = _sampled if ended_at is None else _sampled_once
    per_node = max(2, SPARK_POINTS // len(results.trainings))
    sampled = [
        value
        for node in results.trainings[-SPARK_POINTS:]
        for value in read(history, node, results.metric, per_node, ended_at)
    ]
    return [value for value in sampled if math.isfinite(value)]


_SAMPLE = """
WITH RECURSIVE
  ends (low, high) AS (
    SELECT (SELECT min(step) FROM metrics WHERE node = :node AND name = :name),
           (SELECT max(step) FROM metrics WHERE node = :node AND name = :name)),
  spaced (n, step) AS (
    SELECT 0, low FROM ends
    UNION ALL
    SELECT n + 1, low + (high - low) * (n + 1) / (:count - 1) FROM spaced, ends WHERE n + 1 < :count
  )
SELECT (SELECT value FROM metrics WHERE node = :node AND name = :name AND step >= spaced.step
        ORDER BY step LIMIT 1) AS value
FROM (SELECT DISTINCT step FROM spaced) AS spaced ORDER BY step
"""


def _sampled(
    history: History, node: int, name: str, count: int, _ended_at: float | None
) -> tuple[float, ...]:
    """Reads single values, so that long curves cost no more than short ones."""
    rows = history.select(_SAMPLE, {"node": node, "name": name, "count": count})
    return tuple(float(row["value"]) for row in rows if isinstance(row["value"], int | float))


_sampled_once = functools.lru_cache(maxsize=65536)(_sampled)
