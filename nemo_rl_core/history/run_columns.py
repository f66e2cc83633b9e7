"""Rows of the table of runs, their columns, and rows as plain values."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from nemo_rl_core.history.differences import MISSING
from nemo_rl_core.history.labels import NO_LABELS, Labels
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import Page, State, point_label
from nemo_rl_core.history.run_results import NO_RESULTS, Accuracy, RunResults, gain
from nemo_rl_core.history.run_settings import differing_settings, setting_value


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run, or a point of a sweep.

    Attributes:
        id: Id of the run; for a point also its node, such as `RUN:12`.
        node: Node of the point; None for a run.
        point: Settings of the point.
        pinned: Whether the run is pinned.
        settings: Settings by dotted path, with those of the point.
        overrides: Those given to the command in addition to a recipe.
    """

    id: str
    run: str
    node: int | None
    workflow: str
    recipe: str
    state: State
    started_at: float
    ended_at: float | None
    point: Mapping[str, Any] = field(default_factory=dict)
    labels: Labels = NO_LABELS
    pinned: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    results: RunResults = NO_RESULTS

    def has(self, point: Mapping[str, Any] | None) -> bool:
        """Whether a node or an artifact of the run with this point is of the row."""
        return self.node is None or point == self.point

    @property
    def pipeline(self) -> str:
        """`grpo` for `workflows.grpo.grpo`, or the class of the trainer of a Python run."""
        return "point" if self.node is not None else self.workflow.rpartition(".")[2]


class Column(NamedTuple):
    """A column: heading, value to sort by, and whether it needs settings or results."""

    heading: str
    value: Callable[[RunRow], Any]
    is_light: bool = False


COLUMNS: dict[str, Column] = {
    "name": Column("Name", lambda row: row.labels.name or row.id, True),
    "tags": Column("Tags", lambda row: ", ".join(row.labels.tags) or None, True),
    "note": Column("Note", lambda row: row.labels.note or None, True),
    "pin": Column("Pinned", lambda row: row.pinned or None, True),
    "state": Column("State", lambda row: row.state, True),
    "workflow": Column("Workflow", lambda row: row.pipeline, True),
    "recipe": Column("Recipe", lambda row: f"{row.pipeline} {row.recipe}".strip(), True),
    "settings": Column("Settings", lambda row: str(dict(row.overrides)) or None),
    "before": Column("Accuracy before", lambda row: row.results.before and row.results.before[0]),
    "accuracy": Column("Accuracy", lambda row: row.results.after and row.results.after[0]),
    "gain": Column("Gain", lambda row: gain(row.results)),
    "reward": Column("Reward", lambda row: row.results.reward),
    "loss": Column("Loss", lambda row: row.results.loss),
    "verdict": Column("Verdict", lambda row: row.results.verdict or None),
    "step": Column("Step", lambda row: row.results.step),
    "started": Column("Started", lambda row: row.started_at, True),
    "took": Column("Took", lambda row: (row.ended_at or math.inf) - row.started_at, True),
    "tokens": Column("Tokens", lambda row: row.results.tokens),
    "gpu_hours": Column("GPU-hours", lambda row: row.results.gpu_hours),
    "money": Column("Money", lambda row: row.results.money),
    "stages": Column("Stages", lambda row: row.results.stages),
    "cached": Column("Cached", lambda row: row.results.cached),
}
DEFAULT_COLUMNS = (
    *("name", "state", "recipe", "settings", "accuracy", "reward", "verdict"),
    *("step", "started", "took", "tokens", "gpu_hours", "money"),
)


def value_of(row: RunRow, column: str) -> Any:
    """Returns the value of a column, setting or section of settings; None without one."""
    if column in COLUMNS:
        return COLUMNS[column].value(row)
    value = setting_value(row.settings, column)
    return None if value == MISSING else value


class Band(NamedTuple):
    """Mean, lowest and highest of the `size` rows of a group that have a value."""

    mean: float
    low: float
    high: float
    size: int


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that belong together, newest first."""

    key: str
    label: str
    rows: tuple[RunRow, ...]

    def band(self, column: str) -> Band | None:
        """Returns the band of a column of numbers; a sweep's row does not count with its points."""
        sweeps = {row.run for row in self.rows if row.node is not None}
        members = (row for row in self.rows if row.node is not None or row.run not in sweeps)
        values = [value_of(row, column) for row in members]
        numbers = [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]
        if not numbers:
            return None
        return Band(fmean(numbers), min(numbers), max(numbers), len(numbers))


def grouped(rows: Sequence[RunRow], by: str) -> list[Group]:
    """Groups rows, in the order of their first rows.

    Args:
        by: `sweep` (a sweep and its points), `recipe`, `seed` (rows that differ in nothing but the
            seed), or any column or setting.
    """
    groups: dict[str, list[RunRow]] = {}
    for row in rows:
        groups.setdefault(_group_key(row, by), []).append(row)
    names = differing(rows) if by == "seed" else {}
    return [
        Group(key, _group_label(members, by, names), tuple(members))
        for key, members in groups.items()
    ]


def _group_key(row: RunRow, by: str) -> str:
    if by == "sweep":
        return row.run
    if by == "recipe":
        return f"{row.workflow} {row.recipe}"
    if by == "seed":
        settings = {name: value for name, value in row.settings.items() if name != "seed"}
        is_sweep = row.workflow.endswith(".sweep") and row.node is None
        text = repr((row.workflow, row.run if is_sweep else "", sorted(settings.items(), key=str)))
        return hashlib.sha256(text.encode()).hexdigest()[:12]
    return str(value_of(row, by))


def _group_label(rows: Sequence[RunRow], by: str, names: Mapping[str, list[str]]) -> str:
    first = rows[-1]
    if by == "sweep":
        return f"{first.workflow.rpartition('.')[2]} {first.labels.name or first.run}"
    if by == "recipe":
        return f"{first.workflow.rpartition('.')[2]} {first.recipe}".strip()
    if by == "seed":
        settings = {k: v for k, v in shown_settings(first, names[first.id]).items() if k != "seed"}
        return f"{first.workflow.rpartition('.')[2]} {point_label(settings)}".strip()
    return f"{by} {value_of(first, by)}"


def differing(rows: Sequence[RunRow]) -> dict[str, list[str]]:
    """Returns by row the settings that differ between rows of its workflow, sorted."""
    by_workflow: dict[tuple[str, bool], list[RunRow]] = {}
    for row in rows:
        by_workflow.setdefault((row.workflow, row.node is None), []).append(row)
    names: dict[str, list[str]] = {}
    for group in by_workflow.values():
        changed = sorted(differing_settings([row.settings for row in group]))
        names |= {row.id: changed for row in group}
    return names


def shown_settings(row: RunRow, names: Sequence[str]) -> dict[str, Any]:
    """Returns the row's settings among `names`, then those in which it differs from its recipe."""
    values = {name: setting_value(row.settings, name) for name in names}
    chosen = {name: value for name, value in values.items() if value != MISSING}
    return {**row.point, **chosen, **row.overrides}


def record_of(row: RunRow) -> dict[str, Any]:
    """Returns a row as plain values, for JSON and data frames; settings are not included."""
    results = row.results
    before, after = (
        each or Accuracy(math.nan, None, None) for each in (results.before, results.after)
    )
    return {
        "id": row.id,
        "run": row.run,
        "node": row.node,
        "name": row.labels.name,
        "tags": list(row.labels.tags),
        "note": row.labels.note,
        "pinned": row.pinned,
        "state": row.state,
        "workflow": row.workflow,
        "recipe": row.recipe,
        "started_at": row.started_at,
        "ended_at": row.ended_at,
        "accuracy_before": None if results.before is None else before.value,
        "accuracy_before_low": before.low,
        "accuracy_before_high": before.high,
        "accuracy": None if results.after is None else after.value,
        "accuracy_low": after.low,
        "accuracy_high": after.high,
        "gain": gain(results),
        "reward": results.reward,
        "loss": results.loss,
        "verdict": results.verdict,
        "why": results.why,
        "step": results.step,
        "num_steps": results.num_steps,
        "tokens": results.tokens,
        "gpu_hours": results.gpu_hours,
        "money": results.money,
        "currency": results.currency,
        "stages": results.stages,
        "cached": results.cached,
    }


def page_record(page: Page[RunRow]) -> dict[str, Any]:
    """Returns a list of runs with their settings and results, for JSON."""
    items = [{**_without_nan(row), "settings": dict(row.settings)} for row in page.items]
    counts = {"total": page.total, "offset": page.offset, "limit": page.limit}
    return {"items": items, **counts, "damaged": page.damaged}


def run_record(history: History, row: RunRow) -> dict[str, Any]:
    """Returns a run or a point of a sweep with its nodes, for JSON."""
    nodes = [asdict(node) for node in history.nodes(row.run) if row.has(node.point)]
    return {**asdict(history.execution(row.run)), **_without_nan(row), "nodes": nodes}


def _without_nan(row: RunRow) -> dict[str, Any]:
    return {k: "nan" if repr(v) == "nan" else v for k, v in record_of(row).items()}
