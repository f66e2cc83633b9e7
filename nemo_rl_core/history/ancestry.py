"""Ancestors and descendants of artifacts, across runs, by the parents in their manifests."""

import sqlite3
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from nemo_rl_core.errors import StoreError, UnsafePathError
from nemo_rl_core.history.records import AncestryGraph, ArtifactRow, GraphArtifact, Parentage
from nemo_rl_core.history.rows import read_artifact, read_row
from nemo_rl_core.store.ancestry import recorded_ancestors
from nemo_rl_core.store.manifest import ANCESTORS, MANIFEST, Manifest, ParentRef
from nemo_rl_core.store.paths import resolve_below
from nemo_rl_core.store.store import Store

_State = Literal["found", "missing", "changed"]
_LookUp = Callable[[int, str, str], GraphArtifact]
"""Arguments: depth, id, and expected content hash; empty for the artifact's recorded hash."""
_Relatives = Callable[[GraphArtifact], list[tuple[Parentage, str, str]]]
"""Argument: an artifact. Returns relations, each with the relative's id and recorded hash."""


def upwards(database: sqlite3.Connection, store: Store, root: str) -> AncestryGraph:
    """Returns the artifact and all its ancestors, from disk if they are older than the database."""

    def parents(child: GraphArtifact) -> list[tuple[Parentage, str, str]]:
        rows = database.execute(
            "SELECT * FROM artifact_parents WHERE child = ? ORDER BY parent_id", (child.id,)
        ).fetchall()
        links = [_parent(row, store) for row in rows]
        return [
            (Parentage(each.parent_id, child.id, each.role), each.parent_id, each.parent_hash)
            for each in links
        ] or _manifest_parents(child)

    return _walk(root, _database_lookup(database, store), parents)


def downwards(database: sqlite3.Connection, store: Store, root: str) -> AncestryGraph:
    """Returns the artifact and all its descendants."""

    def children(parent: GraphArtifact) -> list[tuple[Parentage, str, str]]:
        rows = database.execute(
            "SELECT * FROM artifact_parents WHERE parent_id = ? ORDER BY child", (parent.id,)
        )
        links = [_parent(row, store) for row in rows]
        return [(Parentage(parent.id, each.child, each.role), each.child, "") for each in links]

    return _walk(root, _database_lookup(database, store), children)


class _Parent(NamedTuple):
    child: str
    parent_id: str
    parent_hash: str
    role: str


def _parent(row: sqlite3.Row, store: Store) -> _Parent:
    return read_row(_Parent, row, table="artifact_parents", key="child", store=store)


def folder_ancestry(folder: Path) -> AncestryGraph:
    """Returns a downloaded artifact and its ancestors, using only the files in its folder."""
    manifest = Manifest.read(folder)
    root = manifest.ref(folder)
    rows = {root.key: _row(folder, manifest)}
    for key, each in recorded_ancestors(folder).items():
        rows[key] = _row(resolve_below(folder.parent, key, source=ANCESTORS), each)

    def look_up(depth: int, key: str, content_hash: str) -> GraphArtifact:
        row = rows.get(key) or rows.get(
            content_hash
        )  # artifacts without a name have their hash as key
        run = row.manifest["run"] if row else None
        execution = run["execution"] if run else None
        state: Literal["found", "missing"] = "found" if depth == 0 else "missing"
        return GraphArtifact(key, content_hash or root.content_hash, depth, row, execution, state)

    return _walk(root.key, look_up, _manifest_parents)


def _manifest_parents(child: GraphArtifact) -> list[tuple[Parentage, str, str]]:
    parents = []
    for each in child.artifact.manifest["parents"] if child.artifact else ():
        ref = ParentRef.model_validate(each)
        name = ref.name or Path(ref.path).name
        parents.append((Parentage(name, child.id, ref.role), name, ref.content_hash))
    return parents


def _walk(root: str, look_up: _LookUp, relatives: _Relatives) -> AncestryGraph:
    """Walks breadth-first, so that each relative has the depth of its shortest path."""
    artifacts: dict[str, GraphArtifact] = {}
    parentage: list[Parentage] = []
    queue = deque([(0, root, "")])
    while queue:
        depth, artifact, content_hash = queue.popleft()
        if artifact in artifacts:
            continue
        artifacts[artifact] = look_up(depth, artifact, content_hash)
        for link, relative, recorded_hash in relatives(artifacts[artifact]):
            parentage.append(link)
            queue.append((depth + 1, relative, recorded_hash))
    return AncestryGraph(root, tuple(artifacts.values()), tuple(parentage))


def _database_lookup(database: sqlite3.Connection, store: Store) -> _LookUp:
    def look_up(depth: int, artifact: str, content_hash: str) -> GraphArtifact:
        row = database.execute(
            "SELECT artifacts.*, execution FROM artifacts LEFT JOIN nodes ON nodes.id = made_by "
            "WHERE artifacts.id = ?",
            (artifact,),
        ).fetchone()
        record = read_artifact(row, store) if row is not None else in_store(store, artifact)
        execution = row["execution"] if row is not None else None
        expected_hash = content_hash or (record.content_hash if record else "")
        state: _State = _state(Path(record.path), expected_hash) if record else "missing"
        return GraphArtifact(artifact, expected_hash, depth, record, execution, state)

    return look_up


def folder_around(path: Path) -> Path | None:
    """Returns the artifact folder that a path is or is inside of; None if there is none."""
    # Invalid paths (too long, with a null character) are not in artifacts.
    with suppress(OSError, ValueError):
        resolved = path.resolve()
        for folder in (resolved, *resolved.parents) if resolved.exists() else ():
            if (folder / MANIFEST).is_file():
                return folder
    return None


def in_store(store: Store, artifact: str) -> ArtifactRow | None:
    """Reads an artifact's row from its folder in a store; None without a valid manifest."""
    try:
        return from_folder(resolve_below(store.artifacts, artifact, source="the id of an artifact"))
    except UnsafePathError:
        return None


def from_folder(folder: Path) -> ArtifactRow | None:
    """Reads an artifact's row from its folder; None without a valid manifest."""
    try:
        manifest = Manifest.read(folder)
    except StoreError:
        return None
    return _row(folder, manifest)


def _row(folder: Path, manifest: Manifest) -> ArtifactRow:
    return ArtifactRow(
        id=manifest.name or folder.name,
        path=str(folder),
        manifest=manifest.model_dump(mode="json"),
        made_by=None,
        **manifest.model_dump(
            include={"kind", "stage", "format", "content_hash", "step", "created_at"}
        ),
    )


def _state(folder: Path, content_hash: str) -> _State:
    if not (folder / MANIFEST).is_file():
        return "missing"
    row = from_folder(folder)
    return "found" if row and row.content_hash == content_hash else "changed"
