"""Records a run in the database while it goes on.

A run never fails because of its record: the first error (a read-only or damaged file, a full disk)
is logged as one warning, and only the end of the run is still written.
"""

import functools
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import psutil

from nemo_rl_core.errors import StoreError
from nemo_rl_core.history.database import (
    ExecutionLock,
    end_execution,
    mark_aborted,
    open_for_writing,
    path_of,
    transaction,
)
from nemo_rl_core.history.records import Kind, State, Value
from nemo_rl_core.history.stored_paths import to_stored
from nemo_rl_core.store.machine import Machine
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.store import Store

logger = logging.getLogger(__name__)

_MAX_VALUE_BYTES = 64 * 1024
_CUT = "… (cut)"

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class NewExecution:
    """An execution at its start; the fields of `records.Execution`."""

    workflow: str
    recipe: str
    command: Sequence[str]
    inputs: Mapping[str, Any]
    log_path: Path
    git_commit: str | None = None
    git_dirty: bool | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    source_digest: str = ""


@dataclass(frozen=True)
class NodeEnd:
    """The end of a node; the fields of `records.Node`.

    Attributes:
        made: Folders and manifests of the artifacts that the node returned, also of older ones.
    """

    state: State
    outputs: Sequence[Value] = ()
    made: Sequence[tuple[Path, Manifest]] = ()
    deck_path: str = ""
    cost: Mapping[str, float] = field(default_factory=dict)
    summary: str = ""
    error: str = ""
    log_to: int | None = None


def _recorded(
    method: Callable[Concatenate["HistoryWriter", P], R],
) -> Callable[Concatenate["HistoryWriter", P], R | None]:
    """Fault boundary: logs the first error of the database, and stops recording."""

    @functools.wraps(method)
    def guarded(self: "HistoryWriter", /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        with self._lock:
            if not self._is_recording:
                return None
            try:
                return method(self, *args, **kwargs)
            except (sqlite3.Error, OSError, OverflowError, StoreError) as error:
                self._is_recording = False
                logger.warning(
                    "recording of this run in %s stopped, the run goes on: %s",
                    path_of(self._store),
                    str(error).splitlines()[0],
                )
                return None

    return guarded


class HistoryWriter:
    """Writes one execution into the store's database.

    Args:
        store: The store with the database.
        execution_id: Name of the run's folder under `runs/`.

    Example:
        >>> writer = HistoryWriter(store, log.folder.name)                     # doctest: +SKIP
        >>> writer.begin(NewExecution("workflows.sft.sft", "", sys.argv, inputs, log.path))
        >>> node = writer.begin_node("train_sft", task="tasks.train_sft.train_sft", kind="task")
        >>> writer.end_node(node, NodeEnd("succeeded"))
        >>> writer.end("succeeded")
    """

    def __init__(self, store: Store, execution_id: str) -> None:
        self._store, self._id = store, execution_id
        self._lock = threading.RLock()
        self._database: sqlite3.Connection | None = None
        self._execution_lock: ExecutionLock | None = None
        self._is_recording = True

    @_recorded
    def begin(self, execution: NewExecution) -> None:
        """Opens the database and records the start of the execution."""
        self._execution_lock = ExecutionLock(self._store, self._id)
        self._database = open_for_writing(self._store)
        mark_aborted(self._store, self._database)
        process = psutil.Process()
        insert(
            self._database,
            "executions",
            id=self._id,
            workflow=execution.workflow,
            recipe=execution.recipe,
            state="running",
            started_at=time.time(),
            command=_json(list(execution.command)),
            inputs=_json(execution.inputs),
            git_commit=execution.git_commit,
            git_dirty=execution.git_dirty,
            packages=_json(execution.packages),
            machine=Machine.current().model_dump_json(),
            source_digest=execution.source_digest,
            pid=process.pid,
            process_started=process.create_time(),
            log_path=to_stored(self._store, execution.log_path),
            folder=str(Path.cwd()),
        )

    def end(self, state: State, error: str = "") -> None:
        """Records the end of the execution, and closes the database; call it once."""
        with self._lock:
            self._is_recording = self._database is not None
            self._end(state, error)
            if self._database is not None:
                self._database.close()
                self._database = None
            if self._execution_lock is not None:
                self._execution_lock.close()

    @_recorded
    def begin_node(
        self,
        name: str,
        *,
        task: str,
        kind: Kind,
        parent: int | None = None,
        inputs: Sequence[Value] = (),
        log_from: int | None = None,
    ) -> int | None:
        """Records the start of a node.

        Returns:
            Id of the node; None if the database cannot be written.
        """
        with transaction(self._open) as database:
            now = time.time()
            node = insert(
                database,
                "nodes",
                execution=self._id,
                parent=parent,
                name=name,
                task=task,
                kind=kind,
                state="running",
                started_at=now,
                log_from=log_from,
            )
            insert(database, "attempts", node=node, number=1, state="running", started_at=now)
            _insert_values(database, "node_inputs", node, inputs)
        return node

    @_recorded
    def connect(self, source: int | None, output: str, target: int | None, name: str) -> None:
        """Records that an output of one node is an input of another."""
        if source is None or target is None:
            return
        with transaction(self._open) as database:
            database.execute(
                "INSERT OR IGNORE INTO edges VALUES (?, ?, ?, ?, ?)",
                _storable(self._id, source, target, output, name),
            )

    @_recorded
    def end_node(self, node: int | None, end: NodeEnd) -> None:
        """Records the end of a node, and its outputs."""
        if node is None:
            return
        with transaction(self._open) as database:
            now = time.time()
            for folder, manifest in end.made:
                own = end.state == "succeeded" and _is_maker(database, manifest, node)
                insert_artifact(database, self._store, folder, manifest, node if own else None)
            _insert_values(database, "node_outputs", node, end.outputs)
            database.execute(
                "UPDATE nodes SET state = ?, ended_at = ?, cached_from = ?, deck_path = ?, "
                "cost = ?, summary = ?, error = ?, log_to = ? WHERE id = ?",
                _storable(
                    end.state,
                    now,
                    _maker(database, node) if end.state == "cached" else None,
                    to_stored(self._store, end.deck_path),
                    _json(end.cost),
                    end.summary,
                    end.error,
                    end.log_to,
                    node,
                ),
            )
            database.execute(
                "UPDATE attempts SET state = ?, ended_at = ?, error = ? "
                "WHERE node = ? AND state = 'running'",
                _storable(end.state, now, end.error, node),
            )

    @_recorded
    def resumed(self, node: int | None, step: int) -> None:
        """Records that the running attempt resumed from a saved step."""
        if node is None:
            return
        with transaction(self._open) as database:
            database.execute(
                "UPDATE attempts SET resumed_from_step = ? WHERE node = ? AND state = 'running'",
                (step, node),
            )

    @_recorded
    def log_metrics(self, node: int | None, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of a step; a repeated step replaces its metrics."""
        if node is None:
            return
        with transaction(self._open) as database:
            database.executemany(
                "INSERT OR REPLACE INTO metrics VALUES (?, ?, ?, ?)",
                [_storable(node, step, name, float(value)) for name, value in metrics.items()],
            )

    @_recorded
    def _end(self, state: State, error: str) -> None:
        with transaction(self._open) as database:
            (text,) = _storable(error)
            end_execution(database, self._id, state=state, ended_at=time.time(), error=text)

    @property
    def _open(self) -> sqlite3.Connection:
        assert self._database is not None, "call begin first"
        return self._database


def as_value(name: str, kind: str, value: object, artifact: str | None = None) -> Value:
    """Returns an input or output as JSON, cut if longer than 64 KiB."""
    text = _json(value)
    if len(text) > _MAX_VALUE_BYTES:
        text = json.dumps(text[: _MAX_VALUE_BYTES // 2] + _CUT)
    return Value(name, kind, text, artifact)


def _json(value: object) -> str:
    # ASCII: a completion may hold lone surrogates, which SQLite cannot store.
    return json.dumps(value, default=str)


def _storable(*values: Any) -> tuple[Any, ...]:
    """Escapes surrogates, which SQLite cannot store; an error may quote a completion."""
    return tuple(
        each.encode(errors="backslashreplace").decode() if isinstance(each, str) else each
        for each in values
    )


def insert(database: sqlite3.Connection, table: str, **values: object) -> int:
    """Adds a row; returns its id."""
    columns, marks = ", ".join(values), ", ".join("?" * len(values))
    done = database.execute(
        f"INSERT INTO {table} ({columns}) VALUES ({marks})", _storable(*values.values())
    )
    return done.lastrowid or 0


def _insert_values(
    database: sqlite3.Connection, table: str, node: int, values: Sequence[Value]
) -> None:
    database.executemany(
        f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?, ?, ?)",
        [_storable(node, each.name, each.type, each.value, each.artifact) for each in values],
    )


def _is_maker(database: sqlite3.Connection, manifest: Manifest, node: int) -> bool:
    """True if a task made the artifact that it returned, False if it passed on an older one.

    A task may make several artifacts, whose manifests name other stages; they are as new as the
    task.
    """
    row = database.execute(
        "SELECT task, kind, started_at FROM nodes WHERE id = ?", (node,)
    ).fetchone()
    if row["kind"] != "task":
        return False
    created = datetime.fromisoformat(manifest.created_at).timestamp()  # whole seconds
    named = row["task"].rpartition(".")[2] == manifest.stage.partition(" ")[0]
    return named or created >= int(row["started_at"])


def insert_artifact(
    database: sqlite3.Connection,
    store: Store,
    folder: Path,
    manifest: Manifest,
    maker: int | None,
) -> None:
    """Inserts or updates an artifact and its parents.

    The first maker is kept: a later node that returns the artifact passes it on.

    Args:
        database: The store's database, in a transaction.
        store: The store; the artifact may be outside of it.
        folder: Folder of the artifact, which may not exist.
        manifest: Its manifest.
        maker: Id of the node that made it; None if that is another node or unknown.
    """
    name = manifest.name or folder.name
    row = (
        name,
        manifest.kind,
        manifest.stage,
        manifest.format,
        manifest.content_hash,
        to_stored(store, folder),
        manifest.step,
        manifest.created_at,
        manifest.model_dump_json(),
        maker,
    )
    database.execute(
        "INSERT INTO artifacts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) "
        "DO UPDATE SET path = excluded.path, manifest = excluded.manifest, "
        "made_by = coalesce(made_by, excluded.made_by)",
        row,
    )
    made_by = database.execute("SELECT made_by FROM artifacts WHERE id = ?", (name,)).fetchone()[
        "made_by"
    ]
    if maker is not None and made_by == maker:
        # A node that passed it on earlier recorded its parents without the names of the inputs.
        database.execute("DELETE FROM artifact_parents WHERE child = ?", (name,))
    elif database.execute("SELECT 1 FROM artifact_parents WHERE child = ?", (name,)).fetchone():
        return
    database.executemany(
        "INSERT OR IGNORE INTO artifact_parents VALUES (?, ?, ?, ?)",
        [
            (name, parent.content_hash, parent.name or Path(parent.path).name, role)
            for parent, role in zip(
                manifest.parents, _roles(database, maker, manifest), strict=True
            )
        ],
    )


def _roles(database: sqlite3.Connection, maker: int | None, manifest: Manifest) -> list[str]:
    """Names of the maker's inputs that were the artifact's parents."""
    rows = database.execute(
        "SELECT artifact, name FROM node_inputs WHERE node = ? AND artifact IS NOT NULL", (maker,)
    )
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(row["artifact"], []).append(row["name"])
    found = []
    for parent in manifest.parents:
        known = names.get(parent.name or Path(parent.path).name, [])
        found.append(known.pop(0) if known else parent.role)
    return found


def _maker(database: sqlite3.Connection, node: int) -> int | None:
    """Id of the last node of the same task that ran and returned the outputs of this cache hit."""
    row = database.execute(
        "SELECT earlier.id FROM nodes AS hit JOIN node_outputs AS mine ON mine.node = hit.id "
        "JOIN node_outputs AS theirs "
        "ON theirs.artifact = mine.artifact AND theirs.name = mine.name "
        "JOIN nodes AS earlier ON earlier.id = theirs.node "
        "WHERE hit.id = ? AND earlier.id < hit.id AND earlier.task = hit.task "
        "AND earlier.state = 'succeeded' "
        "GROUP BY earlier.id ORDER BY count(*) DESC, earlier.id DESC LIMIT 1",
        (node,),
    ).fetchone()
    return row["id"] if row else None
