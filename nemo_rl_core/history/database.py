"""Opens the runs' database, for writing and for reading."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_rl_core.errors import StoreError
from nemo_rl_core.history.migrations import VERSION, check_version, migrate
from nemo_rl_core.store.store import Store

FILE = "history.db"
_BUSY_SECONDS = 10.0


def path_of(store: Store) -> Path:
    """Path of the store's database."""
    return store.root / FILE


def open_for_writing(store: Store) -> sqlite3.Connection:
    """Opens the database; creates or migrates it if needed."""
    store.create()
    database = _connect(f"{path_of(store).as_uri()}?mode=rwc")
    try:
        # Writers do not wait for the disk: a power failure may lose the last records, a killed
        # process loses none, and the file stays intact in both cases.
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        migrate(database)
    except BaseException:
        database.close()
        raise
    return database


def open_for_reading(store: Store) -> sqlite3.Connection:
    """Opens the database for reading, without blocking writers."""
    path = path_of(store)
    if not path.is_file():
        raise StoreError(
            f"the store {store.root} has no record of any run",
            expected=f"a file {FILE} in it",
            got="no such file",
            fix="run a workflow first, or point NEMO_RL_HOME at the store that was used",
        )
    with sqlite_errors_explained(path):
        database = _open_unchanged(path)
        try:
            if check_version(database) < VERSION:
                database.close()
                open_for_writing(store).close()
                database = _open_unchanged(path)
        except BaseException:
            database.close()
            raise
        return database


def _open_unchanged(path: Path) -> sqlite3.Connection:
    # Reading a database in WAL mode writes files next to it; in a read-only folder it can only be
    # opened as immutable.
    writable = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
    return _connect(f"{path.as_uri()}?mode=ro{'' if writable else '&immutable=1'}")


def _connect(uri: str) -> sqlite3.Connection:
    database = sqlite3.connect(
        uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    database.row_factory = sqlite3.Row
    database.execute("PRAGMA foreign_keys = ON")
    return database


@contextmanager
def sqlite_errors_explained(path: Path) -> Iterator[None]:
    """Turns an error of SQLite into a `StoreError` with a fix."""
    try:
        yield
    except sqlite3.Error as error:
        raise StoreError(
            f"the runs' database {path} cannot be read",
            expected="an intact SQLite file that this user may read",
            got=str(error),
            fix="move it away: the next run creates a new one, and no artifact is lost",
        ) from error


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Runs statements in one transaction."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield database
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:  # a full disk may have ended it already
            database.execute("ROLLBACK")
        raise
