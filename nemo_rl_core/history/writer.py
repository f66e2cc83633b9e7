"""Records a run in the database during the run.

A run never fails because of its record: the first error is logged as one warning.
"""

import functools
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeVar

import psutil

from nemo_rl_core.errors import StoreError
from nemo_rl_core.history.database import open_for_writing, path_of, transaction
from nemo_rl_core.history.inserts import (
    as_json,
    copy_inner_nodes,
    insert,
    insert_artifact,
    insert_values,
    is_maker,
    maker_of,
    storable,
)
from nemo_rl_core.history.liveness import ExecutionLock, end_execution, mark_aborted
from nemo_rl_core.history.records import LAST_STEP, NUM_TOKENS, RUN_SECONDS, Kind, State, Value
from nemo_rl_core.history.signed import sign
from nemo_rl_core.history.stored_paths import to_stored
from nemo_rl_core.store.machine import Machine
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.store import Store
from nemo_rl_core.types import StepReport

logger = logging.getLogger(__name__)

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
    """The end of a node; the fields of `records.Node`."""

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
    """Logs the first error of the database and stops recording; errors do not reach the run."""

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
                    "recording of this run in %s stopped, the run continues: %s",
                    path_of(self._store),
                    str(error).splitlines()[0],
                )
                return None

    return guarded


class HistoryWriter:
    """Writes one execution into the store's database.

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
        self._began = time.time()
        self._num_tokens: dict[int | None, float] = {}

    @_recorded
    def begin(self, execution: NewExecution) -> None:
        """Opens the database and records the start of the execution."""
        self._began = time.time()
        self._execution_lock = ExecutionLock(self._store, self._id)
        self._database = open_for_writing(self._store)
        mark_aborted(self._store, self._database)
        process = psutil.Process()
        # The signature must be of the values that the database returns.
        inputs, folder = storable(as_json(execution.inputs), str(Path.cwd()))
        sign(
            self._store,
            self._id,
            workflow=execution.workflow,
            inputs=json.loads(inputs),
            folder=folder,
        )
        insert(
            self._database,
            "executions",
            id=self._id,
            workflow=execution.workflow,
            recipe=execution.recipe,
            state="running",
            started_at=self._began,
            command=as_json(list(execution.command)),
            inputs=inputs,
            git_commit=execution.git_commit,
            git_dirty=execution.git_dirty,
            packages=as_json(execution.packages),
            machine=Machine.current().model_dump_json(),
            source_digest=execution.source_digest,
            pid=process.pid,
            process_started=process.create_time(),
            log_path=to_stored(self._store, execution.log_path),
            folder=folder,
        )

    def end(self, state: State, error: str = "") -> None:
        """Records the end of the execution and closes the database; call it once."""
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
        point: Mapping[str, Any] = MappingProxyType({}),
    ) -> int | None:
        """Records the start of a node and returns its id; arguments as in `records.Node`."""
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
                point=as_json(dict(point)),
            )
            insert(database, "attempts", node=node, number=1, state="running", started_at=now)
            insert_values(database, "node_inputs", node, inputs)
        return node

    @_recorded
    def connect(self, source: int | None, output: str, target: int | None, name: str) -> None:
        """Records that an output of one node is an input of another."""
        if source is None or target is None:
            return
        with transaction(self._open) as database:
            database.execute(
                "INSERT OR IGNORE INTO edges VALUES (?, ?, ?, ?, ?)",
                storable(self._id, source, target, output, name),
            )

    @_recorded
    def end_node(self, node: int | None, end: NodeEnd) -> None:
        """Records the end of a node and its outputs; a cache hit gets its maker's inner nodes."""
        if node is None:
            return
        with transaction(self._open) as database:
            now = time.time()
            for folder, manifest in end.made:
                is_new = end.state == "succeeded" and is_maker(database, manifest, node)
                insert_artifact(database, self._store, folder, manifest, node if is_new else None)
            insert_values(database, "node_outputs", node, end.outputs)
            maker = maker_of(database, node) if end.state == "cached" else None
            if maker is not None:
                copy_inner_nodes(database, maker, node)
            database.execute(
                "UPDATE nodes SET state = ?, ended_at = ?, cached_from = ?, deck_path = ?, "
                "cost = ?, summary = ?, error = ?, log_to = ? WHERE id = ?",
                storable(
                    end.state,
                    now,
                    maker,
                    to_stored(self._store, end.deck_path),
                    as_json(end.cost),
                    end.summary,
                    end.error,
                    end.log_to,
                    node,
                ),
            )
            database.execute(
                "UPDATE attempts SET state = ?, ended_at = ?, error = ? "
                "WHERE node = ? AND state = 'running'",
                storable(end.state, now, end.error, node),
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
                [storable(node, step, name, float(value)) for name, value in metrics.items()],
            )

    def log_step(self, node: int | None, report: StepReport) -> int:
        """Records the metrics and timings of a step, and how far the run is; returns its number.

        Steps are numbered over the full run, like `global_step`.
        """
        step = int(report.metrics.get("global_step", report.step))
        tokens = self._num_tokens.get(node, 0.0) + report.metrics.get("num_valid_tokens", 0.0)
        self._num_tokens[node] = tokens
        progress = {
            RUN_SECONDS: time.time() - self._began,
            NUM_TOKENS: tokens,
            LAST_STEP: float(step - report.step + report.num_steps),
        }
        timings = {f"timings/{name}": value for name, value in report.timings.items()}
        self.log_metrics(node, step, {**report.metrics, **timings, **progress})
        return step

    @_recorded
    def _end(self, state: State, error: str) -> None:
        with transaction(self._open) as database:
            (text,) = storable(error)
            end_execution(database, self._id, state=state, ended_at=time.time(), error=text)

    @property
    def _open(self) -> sqlite3.Connection:
        assert self._database is not None, "call begin first"
        return self._database
