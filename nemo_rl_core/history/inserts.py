"""Rows for the runs' database: values of limited size, artifacts and their makers."""

import json
import sqlite3
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from nemo_rl_core.config.url_secrets import redacted
from nemo_rl_core.history.records import Value
from nemo_rl_core.history.stored_paths import to_stored
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.store import Store

_MAX_VALUE_BYTES = 64 * 1024
_CUT = "… (cut)"


def as_value(name: str, kind: str, value: object, artifact: str | None = None) -> Value:
    """Returns an input or output as JSON, cut if longer than 64 KiB."""
    text = as_json(value)
    if len(text) > _MAX_VALUE_BYTES:
        text = json.dumps(text[: _MAX_VALUE_BYTES // 2] + _CUT)
    return Value(name, kind, text, artifact)


def as_json(value: object) -> str:
    """Returns a value as JSON."""
    # ASCII, since a completion may contain lone surrogates, which SQLite cannot store.
    return json.dumps(value, default=str)


def storable(*values: Any) -> tuple[Any, ...]:
    """Escapes surrogates, which SQLite cannot store, and hides secrets in addresses.

    An error may quote a completion; a command line or an error may contain an address with a key.
    """
    return tuple(
        redacted(each.encode(errors="backslashreplace").decode()) if isinstance(each, str) else each
        for each in values
    )


def insert(database: sqlite3.Connection, table: str, **values: object) -> int:
    """Adds a row; returns its id."""
    columns, marks = ", ".join(values), ", ".join("?" * len(values))
    done = database.execute(
        f"INSERT INTO {table} ({columns}) VALUES ({marks})", storable(*values.values())
    )
    return done.lastrowid or 0


def insert_values(
    database: sqlite3.Connection, table: str, node: int, values: Sequence[Value]
) -> None:
    """Writes the values of a node."""
    database.executemany(
        f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?, ?, ?)",
        [storable(node, each.name, each.type, each.value, each.artifact) for each in values],
    )


def is_maker(database: sqlite3.Connection, manifest: Manifest, node: int) -> bool:
    """Returns whether a task made the artifact that it returned, not only passed it on."""
    row = database.execute(
        "SELECT task, kind, started_at FROM nodes WHERE id = ?", (node,)
    ).fetchone()
    if row["kind"] != "task":
        return False
    created = datetime.fromisoformat(manifest.created_at).timestamp()  # in full seconds
    is_stage = row["task"].rpartition(".")[2] == manifest.stage.partition(" ")[0]
    return is_stage or created >= int(row["started_at"])


def insert_artifact(
    database: sqlite3.Connection,
    store: Store,
    folder: Path,
    manifest: Manifest,
    maker: int | None,
) -> None:
    """Inserts or updates an artifact and its parents; keeps its first maker, if it has one."""
    name = manifest.name or folder.name
    row = storable(
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
        # An earlier node that only returned it recorded its parents without names of inputs.
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
    rows = database.execute(
        "SELECT artifact, name FROM node_inputs WHERE node = ? AND artifact IS NOT NULL", (maker,)
    )
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(row["artifact"], []).append(row["name"])
    roles = []
    for parent in manifest.parents:
        input_names = names.get(parent.name or Path(parent.path).name, [])
        roles.append(input_names.pop(0) if input_names else parent.role)
    return roles


def maker_of(database: sqlite3.Connection, node: int) -> int | None:
    """Returns the id of the last node of the same task that ran and made a cache hit's outputs.

    The maker of a mapped task is the one that contains the makers of its elements.
    """
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
    row = (
        row
        or database.execute(
            "SELECT maker.parent AS id FROM nodes AS inner JOIN nodes AS maker "
            "ON maker.id = inner.cached_from "
            "WHERE inner.parent = ? AND maker.parent IS NOT NULL ORDER BY maker.id DESC LIMIT 1",
            (node,),
        ).fetchone()
    )
    return row["id"] if row else None


def copy_inner_nodes(database: sqlite3.Connection, maker: int, node: int) -> None:
    """Copies the nodes inside `maker` into `node` as cache hits, if `node` has none inside."""
    if database.execute("SELECT 1 FROM nodes WHERE parent = ?", (node,)).fetchone():
        return
    (execution,) = database.execute("SELECT execution FROM nodes WHERE id = ?", (node,)).fetchone()
    now = time.time()
    for row in database.execute(
        "SELECT * FROM nodes WHERE parent = ? AND state IN ('succeeded', 'cached') ORDER BY id",
        (maker,),
    ).fetchall():
        kept = {name: row[name] for name in ("name", "task", "kind", "summary", "point")}
        inner = insert(
            database,
            "nodes",
            **kept,
            execution=execution,
            parent=node,
            state="cached",
            started_at=now,
            ended_at=now,
            cached_from=row["cached_from"] or row["id"],
        )
        for table in ("node_inputs", "node_outputs"):
            database.execute(
                f"INSERT INTO {table} SELECT ?, name, type, value, artifact FROM {table} "
                "WHERE node = ?",
                (inner, row["id"]),
            )
        copy_inner_nodes(database, row["id"], inner)
