"""The tables of the database, version by version.

Released scripts are never edited; a change is a new script.
Times are seconds since 1970 in UTC; columns named in `records.py` as JSON are text.
"""

import sqlite3

from nemo_rl_core.errors import StoreError

_TABLES = """
CREATE TABLE executions (
  id TEXT PRIMARY KEY, workflow TEXT NOT NULL, recipe TEXT NOT NULL, state TEXT NOT NULL,
  started_at REAL NOT NULL, ended_at REAL, command TEXT NOT NULL, inputs TEXT NOT NULL,
  git_commit TEXT, git_dirty INTEGER, packages TEXT NOT NULL, machine TEXT NOT NULL,
  source_digest TEXT NOT NULL, pid INTEGER NOT NULL, process_started REAL NOT NULL,
  log_path TEXT NOT NULL, error TEXT NOT NULL DEFAULT ''
);
CREATE INDEX executions_by_time ON executions (started_at);
CREATE INDEX executions_by_state ON executions (state, started_at);
CREATE TABLE nodes (
  id INTEGER PRIMARY KEY, execution TEXT NOT NULL REFERENCES executions ON DELETE CASCADE,
  parent INTEGER REFERENCES nodes ON DELETE CASCADE, name TEXT NOT NULL, task TEXT NOT NULL,
  kind TEXT NOT NULL, state TEXT NOT NULL, started_at REAL NOT NULL, ended_at REAL,
  cached_from INTEGER REFERENCES nodes ON DELETE SET NULL, deck_path TEXT NOT NULL DEFAULT '',
  cost TEXT NOT NULL DEFAULT '{}', summary TEXT NOT NULL DEFAULT '', error TEXT NOT NULL DEFAULT ''
);
CREATE INDEX nodes_by_execution ON nodes (execution, state);
CREATE INDEX nodes_by_parent ON nodes (parent);
CREATE INDEX nodes_by_maker ON nodes (cached_from);
CREATE TABLE attempts (
  node INTEGER NOT NULL REFERENCES nodes ON DELETE CASCADE, number INTEGER NOT NULL,
  state TEXT NOT NULL, started_at REAL NOT NULL, ended_at REAL, resumed_from_step INTEGER,
  error TEXT NOT NULL DEFAULT '', PRIMARY KEY (node, number)
) WITHOUT ROWID;
CREATE TABLE artifacts (
  id TEXT PRIMARY KEY, kind TEXT NOT NULL, stage TEXT NOT NULL, format TEXT NOT NULL,
  content_hash TEXT NOT NULL, path TEXT NOT NULL, step INTEGER, created_at TEXT NOT NULL,
  manifest TEXT NOT NULL, made_by INTEGER REFERENCES nodes ON DELETE SET NULL
);
CREATE INDEX artifacts_by_content ON artifacts (content_hash);
CREATE INDEX artifacts_by_maker ON artifacts (made_by);
CREATE TABLE artifact_parents (
  child TEXT NOT NULL REFERENCES artifacts ON DELETE CASCADE, parent_hash TEXT NOT NULL,
  parent_id TEXT NOT NULL, role TEXT NOT NULL, PRIMARY KEY (child, parent_id, role)
) WITHOUT ROWID;
CREATE INDEX artifact_parents_by_parent ON artifact_parents (parent_id);
CREATE TABLE node_inputs (
  node INTEGER NOT NULL REFERENCES nodes ON DELETE CASCADE, name TEXT NOT NULL,
  type TEXT NOT NULL, value TEXT NOT NULL, artifact TEXT, PRIMARY KEY (node, name)
);
CREATE INDEX node_inputs_by_artifact ON node_inputs (artifact);
CREATE TABLE node_outputs (
  node INTEGER NOT NULL REFERENCES nodes ON DELETE CASCADE, name TEXT NOT NULL,
  type TEXT NOT NULL, value TEXT NOT NULL, artifact TEXT, PRIMARY KEY (node, name)
);
CREATE INDEX node_outputs_by_artifact ON node_outputs (artifact);
CREATE TABLE edges (
  execution TEXT NOT NULL REFERENCES executions ON DELETE CASCADE,
  source INTEGER NOT NULL REFERENCES nodes ON DELETE CASCADE,
  target INTEGER NOT NULL REFERENCES nodes ON DELETE CASCADE,
  source_output TEXT NOT NULL, target_input TEXT NOT NULL,
  PRIMARY KEY (execution, target, target_input, source, source_output)
) WITHOUT ROWID;
CREATE INDEX edges_by_source ON edges (source);
CREATE INDEX edges_by_target ON edges (target);
CREATE TABLE metrics (
  node INTEGER NOT NULL REFERENCES nodes ON DELETE CASCADE, step INTEGER NOT NULL,
  name TEXT NOT NULL, value REAL, PRIMARY KEY (node, name, step)
) WITHOUT ROWID;
"""

_LOG_PARTS = """
ALTER TABLE nodes ADD COLUMN log_from INTEGER;
ALTER TABLE nodes ADD COLUMN log_to INTEGER;
"""
"""Byte range of the run's log that was written while a node ran."""

_FOLDER = """
ALTER TABLE executions ADD COLUMN folder TEXT NOT NULL DEFAULT '';
"""
"""Working directory of the command."""

_OWN_LOG = "'/runs/' || id || '/run.log'"


def _from_store(table: str, column: str) -> str:
    is_in_store = f"substr({column}, 1, length(root)) = root"
    root = f"(SELECT max(length(root)) FROM roots WHERE {is_in_store})"
    return (
        f"UPDATE {table} SET {column} = substr({column}, 1 + {root}) "
        f"WHERE EXISTS (SELECT 1 FROM roots WHERE {is_in_store})"
    )


_RELATIVE_PATHS = f"""
CREATE TEMP TABLE roots AS
  SELECT DISTINCT substr(log_path, 1, length(log_path) - length({_OWN_LOG})) || '/' AS root
  FROM executions WHERE substr(log_path, -length({_OWN_LOG})) = {_OWN_LOG};
{_from_store("executions", "log_path")};
{_from_store("nodes", "deck_path")};
{_from_store("artifacts", "path")};
DROP TABLE roots;
"""
"""Makes paths in the store relative to it. The store's location is derived from the paths of the
runs' logs, so that this works for a store that was moved."""

_POINTS = """
ALTER TABLE nodes ADD COLUMN point TEXT NOT NULL DEFAULT '{}';
"""
"""Settings of the sweep's point that a node belongs to. In files of older versions all points of a
sweep share one node with the metrics of the last one; it is not changed."""

_POINTS_INDEX = """
CREATE INDEX nodes_of_points ON nodes (execution) WHERE point <> '{}';
"""
"""Points are rows of the table of runs."""

SCRIPTS = (_TABLES, _LOG_PARTS, _FOLDER, _RELATIVE_PATHS, _POINTS, _POINTS_INDEX)
"""Script `n` migrates from version `n` to `n + 1`."""

VERSION = len(SCRIPTS)


def migrate(database: sqlite3.Connection) -> None:
    """Migrates the tables to `VERSION`; two processes may do so at once."""
    while (version := check_version(database)) < VERSION:
        # `executescript` would commit first; the version is read again under the write lock.
        database.execute("BEGIN IMMEDIATE")
        try:
            if check_version(database) == version:
                for statement in SCRIPTS[version].split(";"):
                    database.execute(statement)
                database.execute(f"PRAGMA user_version = {version + 1}")
            database.execute("COMMIT")
        except BaseException:
            database.execute("ROLLBACK")
            raise


def check_version(database: sqlite3.Connection) -> int:
    """Returns the version of the file, 0 if it is empty; refuses a newer one than this code's."""
    version = int(database.execute("PRAGMA user_version").fetchone()[0])
    if version > VERSION:
        raise StoreError(
            "the runs' database was written by a newer version of nemo-rl-flow",
            expected=f"a schema of version {VERSION} or older",
            got=f"version {version}",
            fix="update nemo-rl-flow, or point NEMO_RL_HOME at another store",
        )
    return version
