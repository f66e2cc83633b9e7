"""Walks along the manifests' parents, across runs: up to the data, down to what was exported."""

import json
import sqlite3
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from nemo_rl_core.errors import StoreError
from nemo_rl_core.history.places import from_record
from nemo_rl_core.history.records import Ancestor, AncestryGraph, ArtifactRow, Parentage
from nemo_rl_core.infra.lineage import MANIFEST, Manifest
from nemo_rl_core.infra.store import Store


def upwards(database: sqlite3.Connection, store: Store, root: str) -> AncestryGraph:
    """The artifact and all that it came from.

    What is older than the database is read from the disk, as far as it is there.
    """

    def parents(child: Ancestor) -> list[tuple[Parentage, str, str]]:
        rows = database.execute(
            "SELECT * FROM artifact_parents WHERE child = ? ORDER BY parent_id", (child.id,)
        ).fetchall()
        known = [(row["parent_id"], row["parent_hash"], row["role"]) for row in rows]
        if not known and child.artifact:
            refs = child.artifact.manifest["parents"]
            known = [(Path(ref["path"]).name, ref["content_hash"], "") for ref in refs]
        return [(Parentage(name, child.id, role), name, digest) for name, digest, role in known]

    return _walk(database, store, root, parents)


def downwards(database: sqlite3.Connection, store: Store, root: str) -> AncestryGraph:
    """The artifact and all that was made from it."""

    def children(parent: Ancestor) -> list[tuple[Parentage, str, str]]:
        rows = database.execute(
            "SELECT * FROM artifact_parents WHERE parent_id = ? ORDER BY child", (parent.id,)
        )
        return [(Parentage(parent.id, row["child"], row["role"]), row["child"], "") for row in rows]

    return _walk(database, store, root, children)


def _walk(
    database: sqlite3.Connection,
    store: Store,
    root: str,
    relatives: Callable[[Ancestor], list[tuple[Parentage, str, str]]],
) -> AncestryGraph:
    """Nearest first: a relative that is reached by two ways has the depth of the shorter one."""
    found: dict[str, Ancestor] = {}
    parentage: list[Parentage] = []
    waiting = deque([(0, root, "")])
    while waiting:
        depth, artifact, content_hash = waiting.popleft()
        if artifact in found:
            continue
        found[artifact] = _look_up(database, store, depth, artifact, content_hash)
        for link, relative, known_hash in relatives(found[artifact]):
            parentage.append(link)
            waiting.append((depth + 1, relative, known_hash))
    return AncestryGraph(root, tuple(found.values()), tuple(parentage))


def _look_up(
    database: sqlite3.Connection, store: Store, depth: int, artifact: str, content_hash: str
) -> Ancestor:
    row = database.execute(
        "SELECT artifacts.*, execution FROM artifacts LEFT JOIN nodes ON nodes.id = made_by "
        "WHERE artifacts.id = ?",
        (artifact,),
    ).fetchone()
    if row is None:
        record, execution = from_folder(store.artifacts / artifact), None
    else:
        fields: dict[str, Any] = {**dict(row), "manifest": json.loads(row["manifest"])}
        fields["path"] = from_record(store, fields["path"])
        execution = fields.pop("execution")
        record = ArtifactRow(**fields)
    known = content_hash or (record.content_hash if record else "")
    folder = Path(record.path) if record else store.artifacts / artifact
    return Ancestor(artifact, known, depth, record, execution, _state(folder, known))


def from_folder(folder: Path) -> ArtifactRow | None:
    """What an artifact's folder says of itself; None where there is no whole manifest."""
    try:
        manifest = Manifest.read(folder)
    except StoreError:
        return None
    return ArtifactRow(
        id=folder.name,
        path=str(folder),
        manifest=manifest.model_dump(mode="json"),
        made_by=None,
        **manifest.model_dump(
            include={"kind", "stage", "format", "content_hash", "step", "created_at"}
        ),
    )


def _state(folder: Path, content_hash: str) -> Literal["found", "missing", "changed"]:
    if not (folder / MANIFEST).is_file():
        return "missing"
    found = from_folder(folder)
    return "found" if found and found.content_hash == content_hash else "changed"
