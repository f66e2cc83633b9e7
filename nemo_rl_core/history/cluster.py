"""A run on a cluster, whose stages share no disk: each writes its own record into its artifact.

`run.json` says which execution, task and attempt made the artifact; its manifest and metrics say
the rest. Where the folders are downloaded, `import_folders` makes of them what a local run writes.
Stages that failed leave no artifact, and so no record here: Flyte's console has them.
"""

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path

from nemo_rl_core.errors import StoreError
from nemo_rl_core.history.database import open_for_writing, transaction
from nemo_rl_core.history.places import to_record
from nemo_rl_core.history.stage_run import StageRun
from nemo_rl_core.history.writer import insert, insert_artifact
from nemo_rl_core.infra.lineage import Manifest
from nemo_rl_core.infra.metrics import MetricsFile
from nemo_rl_core.infra.produce import RECORD
from nemo_rl_core.infra.store import Store


def import_folders(store: Store, folders: Sequence[Path]) -> set[str]:
    """Adds artifacts that a cluster made to the store's record; those it has already stay.

    Args:
        store: Whose record. The artifacts stay where they are.
        folders: Downloaded artifacts, each with `run.json` and `manifest.json`.

    Returns:
        The ids of their executions.

    Raises:
        StoreError: If a folder has no such record.
    """
    found = []
    for folder in folders:
        found.append((folder.resolve(), _read(folder), Manifest.read(folder)))
    found.sort(key=lambda each: each[1].started_at)
    with closing(open_for_writing(store)) as database, transaction(database):
        for folder, run, manifest in found:
            _import(database, store, folder, run, manifest)
    return {run.execution for _, run, _ in found}


def _read(folder: Path) -> StageRun:
    try:
        return StageRun(**json.loads((folder / RECORD).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(
            f"{folder} has no record of a run on a cluster",
            expected=f"an artifact's folder with a whole {RECORD}",
            got=str(error).splitlines()[0],
            fix="download the artifact's whole folder; one made by a local run is recorded already",
        ) from error


def _import(
    database: sqlite3.Connection, store: Store, folder: Path, run: StageRun, manifest: Manifest
) -> None:
    ended = datetime.fromisoformat(manifest.created_at).timestamp()
    known = "SELECT made_by FROM artifacts WHERE id = ? AND made_by IS NOT NULL"
    if database.execute(known, (folder.name,)).fetchone():
        return
    _import_execution(database, run, manifest, ended)
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
        deck_path=to_record(store, folder / "deck.html"),
        cost=manifest.cost.model_dump_json(),
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
    for name, parent in run.parents.items():
        insert(database, "node_inputs", node=node, name=name, type="", value="{}", artifact=parent)
        database.execute(
            "INSERT OR IGNORE INTO edges SELECT nodes.execution, nodes.id, ?, 'o0', ? "
            "FROM artifacts JOIN nodes ON nodes.id = made_by "
            "WHERE artifacts.id = ? AND nodes.execution = ?",
            (node, name, parent, run.execution),
        )
    insert(
        database, "node_outputs", node=node, name="o0", type="", value="{}", artifact=folder.name
    )
    insert_artifact(database, store, folder, manifest, node)
    for line in MetricsFile(folder / "metrics.jsonl").read():
        step = int(line.metrics.get("global_step", line.step))
        for name, value in line.metrics.items():
            insert(database, "metrics", node=node, step=step, name=name, value=value)


def _import_execution(
    database: sqlite3.Connection, run: StageRun, manifest: Manifest, ended: float
) -> None:
    """An execution lasts from its first stage to its last, as far as they were imported."""
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
