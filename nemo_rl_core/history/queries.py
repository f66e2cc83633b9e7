"""Queries of the runs' database, for pages and commands.

Lists that grow with the number of runs are paged. A query sees everything committed before it, also
while runs go on.
"""

import math
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from nemo_rl_core.errors import DamagedRecordError, NotRecordedError, StoreError
from nemo_rl_core.history import ancestry
from nemo_rl_core.history.database import open_for_reading, path_of, sqlite_errors_explained
from nemo_rl_core.history.liveness import mark_all_aborted
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
"""`(step, value)` by the metric's name, steps ascending."""

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

    Runs whose process died are marked as aborted when it is opened, and by `sweep`.

    Raises:
        StoreError: If there is no database, or it is damaged or newer than this code.

    Example:
        >>> with History(Store.default()) as history:                          # doctest: +SKIP
        ...     for run in history.executions(state="failed").items:
        ...         print(run.id, run.error)
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._lock = threading.Lock()
        # Opened first, as it raises a clear error for a damaged file.
        self._database = open_for_reading(store)
        self.sweep()

    def sweep(self) -> None:
        """Marks runs as aborted whose process has died."""
        with sqlite_errors_explained(path_of(self.store)):
            mark_all_aborted(self.store)

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
        """Runs, the latest first.

        Args:
            state: Only runs in this state.
            workflow: Full name, or the last part: `grpo` for `workflows.grpo.grpo`.
            text: Substring of id, recipe, inputs, commit or error; case-insensitive.
            since: Only runs that started then or later (Unix time).
            limit: Largest number of runs to return.
            offset: Number of runs to skip.
        """
        wanted: dict[str, tuple[object, ...]] = {}
        if state:
            wanted["state = ?"] = (state,)
        if workflow:
            wanted["(workflow = ? OR workflow LIKE ? ESCAPE '\\')"] = (
                workflow,
                f"%.{_escaped(workflow)}",
            )
        if since is not None:
            wanted["started_at >= ?"] = (since,)
        if text:
            columns = ("id", "workflow", "recipe", "inputs", "command", "git_commit", "error")
            found = " OR ".join(f"{column} LIKE ? ESCAPE '\\'" for column in columns)
            wanted[f"({found})"] = (f"%{_escaped(text)}%",) * len(columns)
        where = f"WHERE {' AND '.join(wanted)}" if wanted else ""
        values = tuple(value for group in wanted.values() for value in group)
        total = self._one(f"SELECT count(*) AS n FROM executions {where}", values)["n"]
        rows = self._all(
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
        """Names of all recorded workflows."""
        rows = self._all(
            "SELECT DISTINCT workflow FROM executions WHERE typeof(workflow) = 'text' "
            "ORDER BY workflow",
            (),
        )
        return [row["workflow"] for row in rows]

    def execution(self, execution: str) -> Execution:
        """A run by its id.

        Raises:
            StoreError: If there is no such run; the other queries raise likewise.
        """
        row = self._first(f"{_COUNTED} WHERE id = ?", (execution,))
        if row is None:
            raise _unknown("run", execution, "`nemo-rl runs` lists them")
        return read_execution(row, self.store)

    def nodes(self, execution: str) -> list[Node]:
        """All nodes of a run, in order of start."""
        rows = self._all("SELECT * FROM nodes WHERE execution = ? ORDER BY id", (execution,))
        return [self._node(row) for row in rows]

    def edges(self, execution: str) -> list[Edge]:
        """The edges between the nodes of a run."""
        rows = self._all(
            "SELECT source, target, source_output, target_input FROM edges WHERE execution = ? "
            "ORDER BY target, target_input",
            (execution,),
        )
        return [self._read(Edge, row, "edges", "target") for row in rows]

    def node(self, node: int) -> NodeDetail:
        """A node with its attempts, inputs, outputs, and the maker of a cache hit."""
        row = self._first("SELECT * FROM nodes WHERE id = ?", (node,))
        if row is None:
            raise _unknown("node", str(node), "see the nodes of its run")
        found = self._node(row)
        maker = self._first("SELECT * FROM nodes WHERE id = ?", (found.cached_from,))
        attempts = self._all("SELECT * FROM attempts WHERE node = ? ORDER BY number", (node,))
        return NodeDetail(
            node=found,
            attempts=tuple(self._read(Attempt, each, "attempts", "node") for each in attempts),
            inputs=self._values("node_inputs", node),
            outputs=self._values("node_outputs", node),
            maker=self._node(maker) if maker else None,
        )

    def metrics(
        self, node: int, *, names: list[str] | None = None, since_step: int | None = None
    ) -> Curves:
        """The curves of a node so far; a cache hit has the curves of its maker.

        Args:
            node: Id of the node.
            names: Only these; None for all.
            since_step: Only steps after this one.
        """
        marks = "" if names is None else f"AND name IN ({', '.join('?' * len(names))})"
        rows = self._all(
            f"SELECT name, step, value FROM metrics WHERE node = ? {marks} AND step > ? "
            "ORDER BY name, step",
            (self._measured_node(node), *(names or ()), -1 if since_step is None else since_step),
        )
        curves: Curves = {}
        for row in rows:
            point = self._read(_Point, row, "metrics", "name")
            # SQLite has no NaN, and stores NULL for it.
            value = math.nan if point.value is None else point.value
            curves.setdefault(point.name, []).append((point.step, value))
        return curves

    def metric_names(self, node: int) -> list[str]:
        """Names of a node's curves."""
        rows = self._all(
            "SELECT DISTINCT name FROM metrics WHERE node = ? ORDER BY name",
            (self._measured_node(node),),
        )
        return self._metric_names(rows)

    def metric_names_of(self, execution: str) -> dict[int, list[str]]:
        """Names of the curves of a run's nodes, by node; nodes without curves are left out."""
        nodes = self._all(
            "SELECT id, coalesce(cached_from, id) AS measured FROM nodes WHERE execution = ?",
            (execution,),
        )
        # One query per node: over all of them at once, DISTINCT would sort every step.
        query = "SELECT DISTINCT name FROM metrics WHERE node = ? ORDER BY name"
        found = {row["id"]: self._all(query, (row["measured"],)) for row in nodes}
        return {node: self._metric_names(rows) for node, rows in found.items() if rows}

    def artifact_outputs(self, execution: str) -> set[tuple[int, str]]:
        """The outputs of a run's nodes that are artifacts, by node and name."""
        rows = self._all(
            "SELECT node, node_outputs.name FROM node_outputs JOIN nodes ON nodes.id = node "
            "WHERE execution = ? AND artifact <> ''",
            (execution,),
        )
        return {(row["node"], row["name"]) for row in rows}

    def artifact(self, artifact: str) -> ArtifactRow:
        """An artifact by its id."""
        row = self._first("SELECT * FROM artifacts WHERE id = ?", (artifact,))
        if row is None:
            raise _unknown("artifact", artifact, "see the outputs of a run")
        return read_artifact(row, self.store)

    def has_artifact(self, artifact: str) -> bool:
        """True if an artifact of this id is recorded."""
        return self._first("SELECT 1 FROM artifacts WHERE id = ?", (artifact,)) is not None

    def find_artifact(self, name: str) -> ArtifactRow:
        """Finds an artifact by a prefix of its id or content hash, or by a path in its folder.

        Raises:
            StoreError: If none or several match.
        """
        if found := self._on_disk(name):
            return found
        parts = Path(name).expanduser().parts
        rows = []
        for part in reversed(parts):
            rows = self._all("SELECT * FROM artifacts WHERE id = ?", (part,))
            if rows:
                return read_artifact(rows[0], self.store)
        if len(parts) == 1 and not set(name) & set("*?["):
            rows = self._all(
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
            found = ancestry.from_folder(root) if root else None
            if found:
                return self.artifact(found.id) if self.has_artifact(found.id) else found
        return None

    def artifacts_of(self, execution: str) -> list[ArtifactRow]:
        """The artifacts that a run's nodes returned, also from the cache, oldest first."""
        rows = self._all(
            "SELECT * FROM artifacts WHERE id IN (SELECT artifact FROM node_outputs JOIN nodes "
            "ON nodes.id = node_outputs.node WHERE execution = ?) ORDER BY created_at, id",
            (execution,),
        )
        return [read_artifact(row, self.store) for row in rows]

    def points_of(self, execution: str) -> dict[str, dict[str, Any]]:
        """Settings of the sweep's points of a run, by id of the artifacts that a point made."""
        rows = self._all(
            "SELECT artifact, point FROM node_outputs JOIN nodes ON nodes.id = node "
            "WHERE execution = ? AND artifact <> '' AND point <> '{}'",
            (execution,),
        )
        read = partial(read_row, _SweepPoint, table="nodes", key="artifact", store=self.store)
        points = [read(row) for row in rows]
        return {each.artifact: each.point for each in points}

    def artifacts_used(self, execution: str) -> set[str]:
        """Ids of all artifacts that a run's nodes read or returned."""
        rows = self._all(
            "SELECT artifact FROM node_inputs JOIN nodes ON nodes.id = node WHERE execution = ? "
            "UNION SELECT artifact FROM node_outputs JOIN nodes ON nodes.id = node "
            "WHERE execution = ?",
            (execution, execution),
        )
        return {row["artifact"] for row in rows if row["artifact"]}

    def users(self, artifact: str, *, limit: int = 50, offset: int = 0) -> Page[Node]:
        """Nodes that read an artifact, the latest first."""
        found = "FROM nodes WHERE id IN (SELECT node FROM node_inputs WHERE artifact = ?)"
        total = self._one(f"SELECT count(*) AS n {found}", (artifact,))["n"]
        rows = self._all(
            f"SELECT * {found} ORDER BY id DESC LIMIT ? OFFSET ?", (artifact, limit, offset)
        )
        return Page(tuple(self._node(row) for row in rows), total, offset, limit)

    def maker(self, artifact: ArtifactRow) -> Execution | None:
        """The run that made an artifact; None if it is not recorded."""
        row = self._first(
            f"{_COUNTED} WHERE id = (SELECT execution FROM nodes WHERE id = ?)",
            (artifact.made_by,),
        )
        return read_execution(row, self.store) if row else None

    def ancestry(self, artifact: str) -> AncestryGraph:
        """An artifact and all its ancestors, across runs."""
        with self._locked() as database:
            return ancestry.upwards(database, self.store, artifact)

    def descendants(self, artifact: str) -> AncestryGraph:
        """An artifact and all its descendants."""
        with self._locked() as database:
            return ancestry.downwards(database, self.store, artifact)

    def _values(self, table: str, node: int) -> tuple[Value, ...]:
        rows = self._all(f"SELECT * FROM {table} WHERE node = ? ORDER BY rowid", (node,))
        return tuple(self._read(Value, row, table, "node") for row in rows)

    def _metric_names(self, rows: list[sqlite3.Row]) -> list[str]:
        return [self._read(_MetricName, row, "metrics", "name").name for row in rows]

    def _measured_node(self, node: int) -> int:
        row = self._first("SELECT coalesce(cached_from, id) AS id FROM nodes WHERE id = ?", (node,))
        return int(row["id"]) if row else node

    @contextmanager
    def _locked(self) -> Iterator[sqlite3.Connection]:
        with self._lock, sqlite_errors_explained(path_of(self.store)):
            yield self._database

    def _all(self, query: str, values: tuple[object, ...]) -> list[sqlite3.Row]:
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


def _escaped(text: str) -> str:
    """Escapes the wildcards % and _ of LIKE."""
    return "".join(f"\\{character}" if character in "\\%_" else character for character in text)


def _unknown(kind: str, name: str, fix: str) -> NotRecordedError:
    return NotRecordedError(f"the store has no record of the {kind} {name!r}", fix=fix)
