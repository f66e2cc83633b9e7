"""The table of runs: a row per run and per point of a sweep, with settings and results."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from nemo_rl_core.config.names import unknown_names
from nemo_rl_core.errors import ConfigError, DamagedRecordError, NotRecordedError
from nemo_rl_core.history.differences import MISSING
from nemo_rl_core.history.labels import NO_LABELS, Labels, pinned_runs, read_labels, rows_with
from nemo_rl_core.history.queries import History, matching
from nemo_rl_core.history.records import Moment, Page, State
from nemo_rl_core.history.rows import read_row
from nemo_rl_core.history.run_columns import COLUMNS, RunRow, value_of
from nemo_rl_core.history.run_results import read_results, read_results_once
from nemo_rl_core.history.run_settings import num_steps_of, read_settings, setting_value

_CONDITION = re.compile(r"\s*([\w.]+)\s*(<=|>=|!=|=|<|>)\s*(.*?)\s*")


@dataclass(frozen=True, slots=True)
class RunQuery:
    """Which rows, in which order.

    Attributes:
        workflow: Full name or its last part.
        text: Substring of id, recipe, inputs, commit, error, name, tag or note.
        since: Unix time.
        where: Conditions such as `accuracy>0.5` or `grpo.learning_rate=0.001`, all of which hold.
        sort: A column or a setting; with `-` in front the largest first. Rows without a value are
            last. The default also has pinned runs first.
        columns: Columns and settings, or sections of settings, that are shown.
    """

    state: str = ""
    workflow: str = ""
    text: str = ""
    since: float | None = None
    tag: str = ""
    where: Sequence[str] = ()
    sort: str = ""
    limit: int | None = 50
    offset: int = 0
    columns: Sequence[str] = ()


def run_rows(history: History, query: RunQuery = RunQuery()) -> Page[RunRow]:
    """Returns the rows of a query.

    Raises:
        ConfigError: For an unknown column or a malformed condition.
    """
    damaged: list[str] = []
    rows = _light_rows(history, query, damaged)
    conditions = [_condition(each) for each in query.where]
    names = [query.sort.removeprefix("-") or "started", *(each.column for each in conditions)]
    needs_all = any(name not in COLUMNS or not COLUMNS[name].is_light for name in names)
    if needs_all:
        rows = [_complete(history, row, damaged) for row in rows]
    _refuse_unknown(names, rows)
    rows = [row for row in rows if all(each.holds(row) for each in conditions)]
    rows = sorted_rows(rows, query.sort)
    end = None if query.limit is None else query.offset + query.limit
    shown = rows[query.offset : end]
    if not needs_all:
        shown = [_complete(history, row, damaged) for row in shown]
    if _unknown_columns(query.columns, shown):
        every = rows if needs_all else [_complete(history, row, damaged) for row in rows]
        _refuse_unknown(query.columns, every)
    limit = len(rows) if query.limit is None else query.limit
    return Page(tuple(shown), len(rows), query.offset, limit, tuple(dict.fromkeys(damaged)))


def run_row(history: History, row: str) -> RunRow:
    """Returns the row of a run or a point by its name or id, or by the beginning of a run's id."""
    damaged: list[str] = []
    named = rows_with(history.store, name=row)
    row = named[0] if len(named) == 1 else row
    run = row.partition(":")[0]
    rows = _light_rows(history, RunQuery(), damaged, run=run)
    matching_rows = [each for each in rows if each.id == row] or [
        each for each in rows if each.node is None and ":" not in row
    ]
    if len(matching_rows) != 1 or len(named) > 1:
        several = ", ".join((named or [each.id for each in matching_rows])[:6])
        raise NotRecordedError(
            f"{row!r} matches several runs" if several else f"the store has no record of {row!r}",
            got=several or None,
            fix="give more of its id" if several else "`nemo-rl runs` lists all",
        )
    complete = _complete(history, matching_rows[0], damaged)
    if damaged:
        raise DamagedRecordError(damaged[0])
    return complete


def sorted_rows(rows: Iterable[RunRow], sort: str) -> list[RunRow]:
    """Sorts rows by a column; see `RunQuery.sort`."""
    newest = sorted(rows, key=lambda row: (row.started_at, row.id), reverse=True)
    if not sort:
        return sorted(newest, key=lambda row: not row.pinned)
    column = sort.removeprefix("-")
    values = {row.id: value_of(row, column) for row in newest}
    missing = {key for key, value in values.items() if repr(value) in ("None", "nan")}
    with_value = [row for row in newest if row.id not in missing]
    unknown = [row for row in newest if row.id in missing]
    return sorted(with_value, key=lambda row: _order(values[row.id]), reverse=sort[0] == "-") + (
        unknown
    )


def _order(value: Any) -> tuple[int, float, str]:
    if isinstance(value, int | float):
        return (0, float(value), "")
    return (1, 0.0, str(value).casefold())


@dataclass(frozen=True, slots=True)
class _Condition:
    column: str
    operator: str
    value: str

    def holds(self, row: RunRow) -> bool:
        actual = value_of(row, self.column)
        if actual is None:
            return self.operator == "!="
        try:
            left, right = _order(actual), _order(float(self.value))
        except ValueError:
            left, right = _order(str(actual)), _order(self.value)
        if left[0] != right[0]:
            return self.operator == "!="
        return {
            "=": left == right,
            "!=": left != right,
            "<": left < right,
            ">": left > right,
            "<=": left <= right,
            ">=": left >= right,
        }[self.operator]


def _condition(text: str) -> _Condition:
    match = _CONDITION.fullmatch(text)
    if match is None or not match[3]:
        raise ConfigError(
            "a condition on runs is malformed",
            expected="a column, one of = != < > <= >=, and a value, such as accuracy>0.5",
            got=text,
        )
    return _Condition(match[1], match[2], match[3])


def _unknown_columns(names: Sequence[str], rows: Sequence[RunRow]) -> list[str]:
    others = [name for name in names if name not in COLUMNS]
    return [n for n in others if all(setting_value(row.settings, n) == MISSING for row in rows)]


def _refuse_unknown(names: Sequence[str], rows: Sequence[RunRow]) -> None:
    unknown = _unknown_columns(names, rows)
    if unknown and rows:
        settings = {key for row in rows for key in row.settings}
        raise unknown_names(
            "no run has the column",
            unknown,
            [*COLUMNS, *sorted(settings)],
            otherwise="choose a column, or a setting: `nemo-rl keys` lists them",
            expected=f"one of {', '.join(COLUMNS)}, or a setting",
        )


class _Run(NamedTuple):
    id: str
    workflow: str
    recipe: str
    state: State
    started_at: Moment
    ended_at: Moment | None


class _PointNode(NamedTuple):
    id: int
    execution: str
    state: State
    started_at: Moment
    ended_at: Moment | None
    point: dict[str, Any]


_POINTS = """
SELECT nodes.id, nodes.execution, nodes.state, nodes.started_at, nodes.ended_at, nodes.point
FROM nodes LEFT JOIN nodes AS parents ON parents.id = nodes.parent
WHERE nodes.point <> '{}' AND coalesce(parents.point, '{}') = '{}'
"""


def _light_rows(
    history: History, query: RunQuery, damaged: list[str], *, run: str = ""
) -> list[RunRow]:
    """Returns all matching rows without settings and results."""
    labels, pins = read_labels(history.store), pinned_runs(history.store)
    labeled_runs = {key.partition(":")[0] for key in rows_with(history.store, text=query.text)}
    where, values = matching(
        workflow=query.workflow or None,
        text=query.text,
        since=query.since,
        also=sorted(labeled_runs),
    )
    if run:
        where, values = "WHERE substr(id, 1, ?) = ?", (len(run), run)
    columns = "id, workflow, recipe, state, started_at, ended_at"
    rows: list[RunRow] = []
    for each in history.select(f"SELECT {columns} FROM executions {where}", values):
        try:
            record = read_row(_Run, each, table="executions", key="id", store=history.store)
        except DamagedRecordError as error:
            damaged.append(error.in_one_line)
            continue
        rows.append(
            RunRow(
                record.id,
                record.id,
                None,
                *record[1:],
                labels=labels.get(record.id, NO_LABELS),
                pinned=record.id in pins,
            )
        )
    rows += _point_rows(history, {row.id: row for row in rows}, labels, damaged)
    return [
        row
        for row in rows
        if query.state in ("", row.state) and (not query.tag or query.tag in row.labels.tags)
    ]


def _point_rows(
    history: History,
    runs: Mapping[str, RunRow],
    labels: Mapping[str, Labels],
    damaged: list[str],
) -> list[RunRow]:
    rows = []
    for each in history.select(_POINTS, ()):
        if each["execution"] not in runs:
            continue
        try:
            record = read_row(_PointNode, each, table="nodes", key="id", store=history.store)
        except DamagedRecordError as error:
            damaged.append(error.in_one_line)
            continue
        key = f"{record.execution}:{record.id}"
        row = replace(
            runs[record.execution],
            id=key,
            node=record.id,
            state=record.state,
            started_at=record.started_at,
            ended_at=record.ended_at,
            point=record.point,
            labels=labels.get(key, NO_LABELS),
        )
        rows.append(row)
    return rows


def _complete(history: History, row: RunRow, damaged: list[str]) -> RunRow:
    """Returns a row with its settings and results."""
    try:
        settings, overrides = read_settings(history, row.run, row.started_at)
        # A row that has ended does not change.
        read = read_results if row.ended_at is None else read_results_once
        results = read(history, row.run, row.node, row.ended_at)
    except DamagedRecordError as error:
        damaged.append(error.in_one_line)
        return row
    settings = {**settings, **row.point}
    results = replace(results, num_steps=num_steps_of(settings, results.stage))
    return replace(row, settings=settings, overrides=overrides, results=results)
