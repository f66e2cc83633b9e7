"""Which runs are alive, and the end of those whose process has died.

A run holds a lock on `runs/<id>/alive` while its process lives. The kernel releases it however the
process ends. Process ids would not do: they are reused, and differ between containers that share a
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
"""Executions of this process: opening and closing their lock file again would release the lock."""


class ExecutionLock:
    """The lock that an execution holds while its process lives; `close` releases it.

    Raises:
        OSError: If the run's folder cannot be written.
    """

    def __init__(self, store: Store, execution: str) -> None:
        self._execution = execution
        self._path = _lock_path(store, execution)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        # A POSIX lock, not a BSD one: a forked child does not inherit it, so that a worker that
        # outlives its killed parent does not hold it.
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _own_executions.add(execution)

    def close(self) -> None:
        """Releases the lock; idempotent."""
        if self._execution in _own_executions:
            _own_executions.remove(self._execution)
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)


def is_alive(store: Store, execution: str) -> bool:
    """True if the process of the execution is alive."""
    if execution in _own_executions:
        return True
    try:
        descriptor = os.open(_lock_path(store, execution), os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # no permission to lock: a process that may write decides
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
    """Marks running executions as aborted whose process has died; returns their ids."""
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
        return False  # a damaged row, which the queries name
    return not is_alive(store, str(execution))


def mark_all_aborted(store: Store) -> None:
    """Runs `mark_aborted` if the store is writable, else does nothing."""
    try:
        with closing(open_for_writing(store)) as database:
            mark_aborted(store, database)
    except (sqlite3.OperationalError, OSError):
        return


def end_execution(
    database: sqlite3.Connection, execution: str, *, state: str, ended_at: float, error: str = ""
) -> None:
    """Ends a running execution; its running nodes and attempts end as stopped, or as aborted."""
    inner = "stopped" if state == "stopped" else "aborted"
    for table, node in (("attempts", "node"), ("nodes", "id")):
        database.execute(
            f"UPDATE {table} SET state = ?, ended_at = ? WHERE state = 'running' "
            f"AND {node} IN (SELECT id FROM nodes WHERE execution = ?)",
            (inner, ended_at, execution),
        )
    database.execute(
        "UPDATE executions SET state = ?, ended_at = ?, error = ? "
        "WHERE state = 'running' AND id = ?",
        (state, ended_at, error, execution),
    )


def _last_record_time(database: sqlite3.Connection, execution: str) -> float:
    """Time of an execution's last record: the best estimate of when its process died.

    Of figures only samples of the machine have times: the seconds since the run began.
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
        # A damaged time may be a text.
        "SELECT CAST(executions.started_at AS REAL), "
        "max(CAST(nodes.started_at AS REAL)), max(CAST(nodes.ended_at AS REAL)) FROM executions "
        "LEFT JOIN nodes ON nodes.execution = executions.id WHERE executions.id = ?",
        (execution,),
    ).fetchone()
    return max(float(each or 0.0) for each in (*row, sampled))


def _lock_path(store: Store, execution: str) -> Path:
    return store.runs / execution / "alive"
