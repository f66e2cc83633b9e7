"""Queries of the runs' database, for pages and commands; they see everything committed before."""

import math
import sqlite3
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from nemo_rl_core.errors import DamagedRecordError, NotRecordedError, StoreError
from nemo_rl_core.history import ancestry
from nemo_rl_core.history.database import open_for_reading, path_of, sqlite_errors_explained
from nemo_rl_core.history.envelopes import MAX_BUCKETS, Envelope, EnvelopeReader, names_of
from nemo_rl_core.history.liveness import mark_aborted_if_writable
from nemo_rl_core.history.records import (
    AncestryGraph,
    ArtifactRow,
    Attempt,
    Edge,
    Execution,
    Node,
    NodeDetail,
    Page,
    State,
    Value,
)
from nemo_rl_core.history.rows import read_artifact, read_execution, read_row
from nemo_rl_core.store.store import Store

Curves = dict[str, list[tuple[int, float]]]
"""`(step, value)` by name of the metric, in order of steps."""

T = TypeVar("T")


class _MetricName(NamedTuple):
    name: str


class _SweepPoint(NamedTuple):
    artifact: str
    point: dict[str, Any]


class _Point(NamedTuple):
    name: str
    step: int
    value: float | None


_COUNTED = """
SELECT executions.*,
  (SELECT count(*) FROM nodes WHERE execution = executions.id AND kind = 'task') AS num_nodes,
  (SELECT count(*) FROM nodes WHERE execution = executions.id AND state = 'cached') AS num_cached
FROM executions
"""


class History:
    """The recorded runs of a store. A context manager; thread-safe.

    Opening it and `sweep` mark runs whose process died as aborted.

    Example:
        >>> with History(Store.default()) as history:                          # doctest: +SKIP
        ...     for run in history.executions(state="failed").items:
        ...         print(run.id, run.error)
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._envelopes = EnvelopeReader()
        # Opened first, as it raises a clear error for a damaged file.
        self._database = open_for_reading(store)
        self.sweep()

    def sweep(self) -> None:
        """Marks runs whose process died as aborted."""
        with sqlite_errors_explained(path_of(self.store)):
            mark_aborted_if_writable(self.store)

    def close(self) -> None:
        """Closes the database."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def executions(
        self,
        *,
        state: State | None = None,
        workflow: str | None = None,
        text: str = "",
        since: float | None = None,
        limit: int = 50,
        offset: int = 0,
    ) -> Page[Execution]:
        """Returns runs, latest first.

        Args:
            workflow: Full name or its last part: `grpo` for `workflows.grpo.grpo`.
            text: Substring of id, recipe, inputs, commit or error; case-insensitive.
            since: Only runs that started then or later (Unix time).
        """
        where, values = matching(state=state, workflow=workflow, text=text, since=since)
        total = self._one(f"SELECT count(*) AS n FROM executions {where}", values)["n"]
        rows = self.select(
            f"{_COUNTED} {where} ORDER BY started_at DESC, id DESC LIMIT ? OFFSET ?",
            (*values, limit, offset),
        )
        items: list[Execution] = []
        damaged: list[str] = []
        for row in rows:
            try:
                items.append(read_execution(row, self.store))
            except DamagedRecordError as error:
                damaged.append(error.in_one_line)
        return Page(tuple(items), total, offset, limit, tuple(damaged))

    def workflows(self) -> list[str]:
        """Returns the names of all recorded workflows."""
        rows = self.select(
            "SELECT DISTINCT workflow FROM executions WHERE typeof(workflow) = 'text' "
            "ORDER BY workflow",
            (),
        )
        return [row["workflow"] for row in rows]

    def execution(self, execution: str) -> Execution:
        """Returns a run by its id."""
        row = self._first(f"{_COUNTED} WHERE id = ?", (execution,))
        if row is None:
            raise _unknown("run", execution, "`nemo-rl runs` lists them")
        return read_execution(row, self.store)

    def nodes(self, execution: str) -> list[Node]:
        """Returns all nodes of a run in order of start."""
        rows = self.select("SELECT * FROM nodes WHERE execution = ? ORDER BY id", (execution,))
        return [self._node(row) for row in rows]

    def edges(self, execution: str) -> list[Edge]:
        """Returns the edges between the nodes of a run."""
        rows = self.select(
            "SELECT source, target, source_output, target_input FROM edges WHERE execution = ? "
            "ORDER BY target, target_input",
            (execution,),
        )
        return [self._read(Edge, row, "edges", "target") for row in rows]

    def node(self, node: int) -> NodeDetail:
        """Returns a node with its attempts, inputs, outputs, and the maker of a cache hit."""
        row = self._first("SELECT * FROM nodes WHERE id = ?", (node,))
        if row is None:
            raise _unknown("node", str(node), "see the nodes of its run")
        record = self._node(row)
        maker = self._first("SELECT * FROM nodes WHERE id = ?", (record.cached_from,))
        attempts = self.select("SELECT * FROM attempts WHERE node = ? ORDER BY number", (node,))
        return NodeDetail(
            node=record,
            attempts=tuple(self._read(Attempt, each, "attempts", "node") for each in attempts),
            inputs=self._values("node_inputs", node),
            outputs=self._values("node_outputs", node),
            maker=self._node(maker) if maker else None,
        )

    def metrics(
        self, node: int, *, names: list[str] | None = None, since_step: int | None = None
    ) -> Curves:
        """Returns the curves of a node after `since_step`; a cache hit has those of its maker."""
        marks = "" if names is None else f"AND name IN ({', '.join('?' * len(names))})"
        rows = self.select(
            f"SELECT name, step, value FROM metrics WHERE node = ? {marks} AND step > ? "
            "ORDER BY name, step",
            (self._measured_node(node), *(names or ()), -1 if since_step is None else since_step),
        )
        curves: Curves = {}
        for row in rows:
            point = self._read(_Point, row, "metrics", "name")
            # SQLite stores NaN as NULL.
            value = math.nan if point.value is None else point.value
            curves.setdefault(point.name, []).append((point.step, value))
        return curves

    def envelopes(
        self,
        node: int,
        names: list[str],
        *,
        axis: str = "",
        between: tuple[int, int] | None = None,
        most: int = MAX_BUCKETS,
    ) -> dict[str, Envelope]:
        """Returns thinned curves of a node; see `EnvelopeReader.read` for the arguments."""
        with self._locked() as database:
            return self._envelopes.read(
                database, node, names, axis=axis, between=between, most=most
            )

    def last_value(self, node: int, name: str) -> tuple[int, float] | None:
        """Returns the latest step of a metric and its value, NaN if it is not finite."""
        row = self._first(
            "SELECT name, step, value FROM metrics WHERE node = ? AND name = ? "
            "ORDER BY step DESC LIMIT 1",
            (self._measured_node(node), name),
        )
        if row is None:
            return None
        point = self._read(_Point, row, "metrics", "name")
        return point.step, math.nan if point.value is None else point.value

    def version(self) -> int:
        """Returns a number that changes when another connection has written to the database."""
        return int(self._one("PRAGMA data_version", ())[0])

    def num_tasks_before(self, run: Execution) -> int | None:
        """Returns the number of tasks of the last such run that succeeded; None without one."""
        row = self._first(
            f"{_COUNTED} WHERE workflow = ? AND recipe = ? AND state = 'succeeded' AND id <> ? "
            "ORDER BY started_at DESC LIMIT 1",
            (run.workflow, run.recipe, run.id),
        )
        return int(row["num_nodes"]) if row else None

    def metric_names(self, node: int) -> list[str]:
        """Returns the names of a node's curves."""
        measured = self._measured_node(node)
        with self._locked() as database:
            rows = names_of(database, measured)
        return self._metric_names(rows)

    def metric_names_of(self, execution: str) -> dict[int, list[str]]:
        """Returns the names of curves by node of a run, without nodes that have none."""
        nodes = self.select(
            "SELECT id, coalesce(cached_from, id) AS measured FROM nodes WHERE execution = ?",
            (execution,),
        )
        with self._locked() as database:
            rows_by_node = {row["id"]: names_of(database, row["measured"]) for row in nodes}
        return {node: self._metric_names(rows) for node, rows in rows_by_node.items() if rows}

    def artifact_outputs(self, execution: str) -> set[tuple[int, str]]:
        """Returns node and name of all outputs of a run that are artifacts."""
        rows = self.select(
            "SELECT node, node_outputs.name FROM node_outputs JOIN nodes ON nodes.id = node "
            "WHERE execution = ? AND artifact <> ''",
            (execution,),
        )
        return {(row["node"], row["name"]) for row in rows}

    def artifact(self, artifact: str) -> ArtifactRow:
        """Returns an artifact by its id."""
        row = self._first("SELECT * FROM artifacts WHERE id = ?", (artifact,))
        if row is None:
            raise _unknown("artifact", artifact, "see the outputs of a run")
        return read_artifact(row, self.store)

    def has_artifact(self, artifact: str) -> bool:
        """Returns whether an artifact of this id is recorded."""
        return self._first("SELECT 1 FROM artifacts WHERE id = ?", (artifact,)) is not None

    def find_artifact(self, name: str) -> ArtifactRow:
        """Finds an artifact by a prefix of its id or content hash, or by a path in its folder."""
        if found := self._on_disk(name):
            return found
        parts = Path(name).expanduser().parts
        rows = []
        for part in reversed(parts):
            rows = self.select("SELECT * FROM artifacts WHERE id = ?", (part,))
            if rows:
                return read_artifact(rows[0], self.store)
        if len(parts) == 1 and not set(name) & set("*?["):
            rows = self.select(
                "SELECT * FROM artifacts WHERE id GLOB ? OR content_hash GLOB ? LIMIT 6",
                (f"{name}*", f"{name}*"),
            )
        if len(rows) == 1:
            return read_artifact(rows[0], self.store)
        if rows:
            several = ", ".join(row["id"] for row in rows)
            raise StoreError(
                f"{name!r} matches several artifacts",
                expected="a prefix of one id",
                got=several,
            )
        raise _unknown("artifact", name, "give its id, its folder, or the beginning of its hash")

    def _on_disk(self, name: str) -> ArtifactRow | None:
        """Finds an artifact by a path in its folder, which may have been moved or renamed."""
        for folder in (Path(name).expanduser(), self.store.artifacts / name):
            root = ancestry.folder_around(folder)
            row = ancestry.from_folder(root) if root else None
            if row:
                return self.artifact(row.id) if self.has_artifact(row.id) else row
        return None

    def artifacts_of(self, execution: str) -> list[ArtifactRow]:
        """Returns the artifacts that a run's nodes returned, also from the cache, oldest first."""
        rows = self.select(
            "SELECT * FROM artifacts WHERE id IN (SELECT artifact FROM node_outputs JOIN nodes "
            "ON nodes.id = node_outputs.node WHERE execution = ?) ORDER BY created_at, id",
            (execution,),
        )
        return [read_artifact(row, self.store) for row in rows]

    def points_of(self, execution: str) -> dict[str, dict[str, Any]]:
        """Returns settings of the points of a run's sweep, by id of the artifacts they made."""
        rows = self.select(
            "SELECT artifact, point FROM node_outputs JOIN nodes ON nodes.id = node "
            "WHERE execution = ? AND artifact <> '' AND point <> '{}'",
            (execution,),
        )
        parse = partial(read_row, _SweepPoint, table="nodes", key="artifact", store=self.store)
        points = [parse(row) for row in rows]
        return {each.artifact: each.point for each in points}

    def artifacts_used(self, execution: str) -> set[str]:
        """Returns the ids of all artifacts that a run's nodes read or returned."""
        rows = self.select(
            "SELECT artifact FROM node_inputs JOIN nodes ON nodes.id = node WHERE execution = ? "
            "UNION SELECT artifact FROM node_outputs JOIN nodes ON nodes.id = node "
            "WHERE execution = ?",
            (execution, execution),
        )
        return {row["artifact"] for row in rows if row["artifact"]}

    def users(self, artifact: str, *, limit: int = 50, offset: int = 0) -> Page[Node]:
        """Returns nodes that read an artifact, latest first."""
        source = "FROM nodes WHERE id IN (SELECT node FROM node_inputs WHERE artifact = ?)"
        total = self._one(f"SELECT count(*) AS n {source}", (artifact,))["n"]
        rows = self.select(
            f"SELECT * {source} ORDER BY id DESC LIMIT ? OFFSET ?", (artifact, limit, offset)
        )
        return Page(tuple(self._node(row) for row in rows), total, offset, limit)

    def maker(self, artifact: ArtifactRow) -> Execution | None:
        """Returns the run that made an artifact; None if it is not recorded."""
        row = self._first(
            f"{_COUNTED} WHERE id = (SELECT execution FROM nodes WHERE id = ?)",
            (artifact.made_by,),
        )
        return read_execution(row, self.store) if row else None

    def ancestry(self, artifact: str) -> AncestryGraph:
        """Returns an artifact and all its ancestors, across runs."""
        with self._locked() as database:
            return ancestry.upwards(database, self.store, artifact)

    def descendants(self, artifact: str) -> AncestryGraph:
        """Returns an artifact and all its descendants."""
        with self._locked() as database:
            return ancestry.downwards(database, self.store, artifact)

    def _values(self, table: str, node: int) -> tuple[Value, ...]:
        rows = self.select(f"SELECT * FROM {table} WHERE node = ? ORDER BY rowid", (node,))
        return tuple(self._read(Value, row, table, "node") for row in rows)

    def _metric_names(self, rows: list[sqlite3.Row]) -> list[str]:
        # Validated only if damaged: a sweep has a hundred thousand names.
        return [
            row["name"]
            if isinstance(row["name"], str)
            else self._read(_MetricName, row, "metrics", "name").name
            for row in rows
        ]

    def _measured_node(self, node: int) -> int:
        row = self._first("SELECT coalesce(cached_from, id) AS id FROM nodes WHERE id = ?", (node,))
        return int(row["id"]) if row else node

    @contextmanager
    def _locked(self) -> Iterator[sqlite3.Connection]:
        with self._lock, sqlite_errors_explained(path_of(self.store)):
            yield self._database

    def select(
        self, query: str, values: Sequence[object] | Mapping[str, object]
    ) -> list[sqlite3.Row]:
        """Returns the rows of a query."""
        with self._locked() as database:
            return database.execute(query, values).fetchall()

    def _first(self, query: str, values: tuple[object, ...]) -> sqlite3.Row | None:
        with self._locked() as database:
            row: sqlite3.Row | None = database.execute(query, values).fetchone()
            return row

    def _one(self, query: str, values: tuple[object, ...]) -> sqlite3.Row:
        row = self._first(query, values)
        assert row is not None, query
        return row

    def _node(self, row: sqlite3.Row) -> Node:
        return self._read(Node, row, "nodes", "id")

    def _read(self, kind: type[T], row: sqlite3.Row, table: str, key: str) -> T:
        return read_row(kind, row, table=table, key=key, store=self.store)


def matching(
    *,
    state: State | None = None,
    workflow: str | None = None,
    text: str = "",
    since: float | None = None,
    also: Collection[str] = (),
) -> tuple[str, tuple[object, ...]]:
    """Returns the WHERE clause for runs, and its values.

    Args:
        also: Ids of runs that match `text` in another way.
    """
    conditions: dict[str, tuple[object, ...]] = {}
    if state:
        conditions["state = ?"] = (state,)
    if workflow:
        conditions["(workflow = ? OR workflow LIKE ? ESCAPE '\\')"] = (
            workflow,
            f"%.{_escaped(workflow)}",
        )
    if since is not None:
        conditions["started_at >= ?"] = (since,)
    if text:
        columns = ("id", "workflow", "recipe", "inputs", "command", "git_commit", "error")
        matches = [f"{column} LIKE ? ESCAPE '\\'" for column in columns]
        matches += [f"id IN ({', '.join('?' * len(also))})"] if also else []
        conditions[f"({' OR '.join(matches)})"] = (f"%{_escaped(text)}%",) * len(columns) + (*also,)
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    return where, tuple(value for group in conditions.values() for value in group)


def _escaped(text: str) -> str:
    return "".join(f"\\{character}" if character in "\\%_" else character for character in text)


def _unknown(kind: str, name: str, fix: str) -> NotRecordedError:
    return NotRecordedError(f"the store has no record of the {kind} {name!r}", fix=fix)
