"""Imports runs from a cluster, whose stages share no disk and write their records into artifacts.

`ancestors.json` of one downloaded artifact is enough for its full ancestry; decks, metrics and
files come from the downloaded folders. Failed stages leave no artifact and so no record here.
"""

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from nemo_rl_core.errors import StoreError
from nemo_rl_core.history.database import open_for_writing, transaction
from nemo_rl_core.history.inserts import insert, insert_artifact
from nemo_rl_core.history.stored_paths import from_stored, to_stored
from nemo_rl_core.store.ancestry import recorded_ancestors
from nemo_rl_core.store.manifest import ANCESTORS, MANIFEST, Manifest, StageRun
from nemo_rl_core.store.paths import resolve_below
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.metrics import MetricsFile


def import_folders(store: Store, folders: Sequence[Path]) -> set[str]:
    """Adds artifacts that a cluster made, and their ancestors, to the store's history.

    Importing a folder again records its new location. Returns the ids of the executions.
    """
    made_by_runs: dict[str, tuple[StageRun, Manifest]] = {}
    others: dict[str, Manifest] = {}
    paths: dict[str, Path] = {}
    for folder in folders:
        run, manifest = _read(folder)
        _refuse_hostile_names(store, manifest.name, run, MANIFEST)
        made_by_runs[manifest.name], paths[manifest.name] = (run, manifest), folder.resolve()
        for name, each in recorded_ancestors(folder).items():
            _refuse_hostile_names(store, name, each.run, ANCESTORS)
            if each.run is None:  # from a local run, uploaded later
                others[name] = each
            else:
                made_by_runs.setdefault(name, (each.run, each))
    with closing(open_for_writing(store)) as database, transaction(database):
        for name, each in others.items():
            if _recorded_path(database, store, name) is None:
                insert_artifact(database, store, _folder(store, name), each, None)
        in_order = sorted(made_by_runs.items(), key=lambda each: each[1][0].started_at)
        nodes = {
            name: _import(database, store, run, manifest, paths.get(name))
            for name, (run, manifest) in in_order
        }
        for name, (run, manifest) in in_order:
            _connect(database, run, manifest, nodes[name])
    return {run.execution for run, _ in made_by_runs.values()}


def _refuse_hostile_names(store: Store, name: str, run: StageRun | None, source: str) -> None:
    resolve_below(store.artifacts, name, source=source)
    if run is not None:
        resolve_below(store.runs, run.execution, source=source)


def _folder(store: Store, name: str) -> Path:
    return resolve_below(store.artifacts, name, source=MANIFEST)


def _read(folder: Path) -> tuple[StageRun, Manifest]:
    manifest = Manifest.read(folder)
    if manifest.run is None:
        raise StoreError(
            f"{folder} was not made on a cluster",
            expected="a manifest that names the run",
            got="the manifest of a local run",
            fix="inspect it in the store where it was made, which has its record already",
        )
    return manifest.run, manifest


def _import(
    database: sqlite3.Connection,
    store: Store,
    run: StageRun,
    manifest: Manifest,
    folder: Path | None,
) -> int:
    existing = database.execute(
        "SELECT nodes.id FROM nodes JOIN node_outputs ON node = nodes.id "
        "WHERE execution = ? AND artifact = ?",
        (run.execution, manifest.name),
    ).fetchone()
    node: int = existing["id"] if existing else _insert_node(database, run, manifest)
    recorded_path = _recorded_path(database, store, manifest.name)
    if recorded_path is None or (folder is not None and not recorded_path.is_dir()):
        # An identical artifact of a local run stays recorded.
        new_path = folder or _folder(store, manifest.name)
        insert_artifact(database, store, new_path, manifest, node)
    if folder is not None:
        _record_files(database, store, node, folder)
    return node


def _recorded_path(database: sqlite3.Connection, store: Store, name: str) -> Path | None:
    row = database.execute("SELECT path FROM artifacts WHERE id = ?", (name,)).fetchone()
    return Path(from_stored(store, row["path"], may_be_outside=True)) if row else None


def _insert_node(database: sqlite3.Connection, run: StageRun, manifest: Manifest) -> int:
    # The time in the manifest has a resolution of one second.
    ended = run.started_at + manifest.cost.wall_seconds
    _import_execution(database, run, manifest, ended)
    point = manifest.config.get("point")  # for a point of a sweep
    node = insert(
        database,
        "nodes",
        execution=run.execution,
        name=manifest.stage,
        task=run.task,
        kind="task",
        state="succeeded",
        started_at=run.started_at,
        ended_at=ended,
        cost=manifest.cost.model_dump_json(),
        point=json.dumps(point if isinstance(point, dict) else {}),
    )
    insert(
        database,
        "attempts",
        node=node,
        number=run.attempt,
        state="succeeded",
        started_at=run.started_at,
        ended_at=ended,
    )
    for parent in manifest.parents:
        values = {"node": node, "name": parent.role, "type": "", "value": "{}"}
        insert(database, "node_inputs", **values, artifact=parent.name)
    values = {"node": node, "name": "o0", "type": "", "value": "{}"}
    insert(database, "node_outputs", **values, artifact=manifest.name)
    return node


def _connect(database: sqlite3.Connection, run: StageRun, manifest: Manifest, node: int) -> None:
    """Adds edges from the nodes of the same execution that made this node's inputs."""
    for parent in manifest.parents:
        database.execute(
            "INSERT OR IGNORE INTO edges SELECT execution, nodes.id, ?, 'o0', ? "
            "FROM nodes JOIN node_outputs ON node = nodes.id "
            "WHERE artifact = ? AND execution = ?",
            (node, parent.role, parent.name, run.execution),
        )


def _record_files(database: sqlite3.Connection, store: Store, node: int, folder: Path) -> None:
    deck = to_stored(store, folder / "deck.html")
    database.execute("UPDATE nodes SET deck_path = ? WHERE id = ?", (deck, node))
    database.execute("DELETE FROM metrics WHERE node = ?", (node,))
    for line in MetricsFile(folder / "metrics.jsonl").read():
        step = int(line.metrics.get("global_step", line.step))
        for name, value in line.metrics.items():
            insert(database, "metrics", node=node, step=step, name=name, value=value)


def _import_execution(
    database: sqlite3.Connection, run: StageRun, manifest: Manifest, ended: float
) -> None:
    exists = "SELECT 1 FROM executions WHERE id = ?"
    if not database.execute(exists, (run.execution,)).fetchone():
        insert(
            database,
            "executions",
            id=run.execution,
            workflow=run.workflow.rpartition(":")[2],
            recipe="",
            state="succeeded",
            started_at=run.started_at,
            command="[]",
            inputs="{}",
            git_commit=manifest.git_commit,
            git_dirty=manifest.git_dirty,
            packages=json.dumps(manifest.packages),
            machine=manifest.machine.model_dump_json(),
            source_digest="",
            pid=0,
            process_started=0.0,
            log_path="",
        )
    database.execute(
        "UPDATE executions SET started_at = min(started_at, ?), "
        "ended_at = max(coalesce(ended_at, 0), ?) WHERE id = ?",
        (run.started_at, ended, run.execution),
    )
