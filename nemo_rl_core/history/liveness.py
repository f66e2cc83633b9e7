"""Detects live runs and marks runs whose process died as aborted.

A run, called `execution` in code and tables, keeps a lock on `runs/<id>/alive` while its process
lives. Process ids are not sufficient: they are reused, and differ between containers that share a
store.
"""

import fcntl
import os
import sqlite3
from contextlib import closing
from pathlib import Path

from nemo_rl_core.errors import UnsafePathError
from nemo_rl_core.history.database import FILE, open_for_writing, transaction
from nemo_rl_core.store.paths import resolve_below
from nemo_rl_core.store.store import Store

_own_executions: set[str] = set()
"""Executions of this process; reopening and closing their lock file would release the lock."""


class ExecutionLock:
    """The lock of an execution while its process lives; `close` releases it."""

    def __init__(self, store: Store, execution: str) -> None:
        self._execution = execution
        self._path = _lock_path(store, execution)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        # A POSIX lock, not a BSD one: forked children do not inherit it, so a worker that outlives
        # its killed parent does not keep it.
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _own_executions.add(execution)

    def close(self) -> None:
        """Releases the lock; idempotent."""
        if self._execution in _own_executions:
            _own_executions.remove(self._execution)
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)


def is_alive(store: Store, execution: str) -> bool:
    """Returns whether the process of the execution is alive."""
    if execution in _own_executions:
        return True
    try:
        descriptor = os.open(_lock_path(store, execution), os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # no permission to lock: only processes with write access can decide
    try:
        # Shared, so that two concurrent checks do not mistake each other for the run.
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def mark_aborted(store: Store, database: sqlite3.Connection) -> list[str]:
    """Marks running executions of dead processes as aborted; returns their ids."""
    rows = database.execute("SELECT id FROM executions WHERE state = 'running'").fetchall()
    dead = [row["id"] for row in rows if _is_dead(store, row["id"])]
    for execution in dead:
        with transaction(database):
            last = _last_record_time(database, execution)
            end_execution(database, execution, state="aborted", ended_at=last)
    return dead


def _is_dead(store: Store, execution: object) -> bool:
    try:
        resolve_below(store.runs, str(execution), source=FILE)
    except UnsafePathError:
        return False  # a damaged row, which the queries report
    return not is_alive(store, str(execution))


def mark_aborted_if_writable(store: Store) -> None:
    """Runs `mark_aborted` if the store is writable, else does nothing."""
    try:
        with closing(open_for_writing(store)) as database:
            mark_aborted(store, database)
    except (sqlite3.OperationalError, OSError):
        return


def end_execution(
    database: sqlite3.Connection, execution: str, *, state: str, ended_at: float, error: str = ""
) -> None:
    """Ends a running execution; its running nodes and attempts end as stopped or aborted."""
    node_state = "stopped" if state == "stopped" else "aborted"
    for table, node in (("attempts", "node"), ("nodes", "id")):
        database.execute(
            f"UPDATE {table} SET state = ?, ended_at = ? WHERE state = 'running' "
            f"AND {node} IN (SELECT id FROM nodes WHERE execution = ?)",
            (node_state, ended_at, execution),
        )
    database.execute(
        "UPDATE executions SET state = ?, ended_at = ?, error = ? "
        "WHERE state = 'running' AND id = ?",
        (state, ended_at, error, execution),
    )


def _last_record_time(database: sqlite3.Connection, execution: str) -> float:
    """Returns the time of an execution's last record, as an estimate of its end.

    Among metrics, only samples of the machine have times, in seconds since the start of the run.
    """
    sampled = database.execute(
        "SELECT max(CAST(executions.started_at AS REAL) + CAST(metrics.step AS REAL)) "
        "FROM executions "
        "JOIN nodes ON nodes.execution = executions.id AND nodes.state = 'running' "
        "JOIN metrics ON metrics.node = nodes.id AND metrics.name GLOB 'machine/*' "
        "WHERE executions.id = ?",
        (execution,),
    ).fetchone()[0]
    row = database.execute(
        # A damaged time may be text.
        "SELECT CAST(executions.started_at AS REAL), "
        "max(CAST(nodes.started_at AS REAL)), max(CAST(nodes.ended_at AS REAL)) FROM executions "
        "LEFT JOIN nodes ON nodes.execution = executions.id WHERE executions.id = ?",
        (execution,),
    ).fetchone()
    return max(float(each or 0.0) for each in (*row, sampled))


def _lock_path(store: Store, execution: str) -> Path:
    return store.runs / execution / "alive"
