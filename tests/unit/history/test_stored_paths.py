"""A moved store keeps its record, also if an older version wrote it."""

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

from nemo_rl_core.history.inserts import as_value
from nemo_rl_core.history.migrations import SCRIPTS
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.writer import HistoryWriter, NodeEnd
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.store import Store

WITH_WHOLE_PATHS = 3
"""The last version of the tables with absolute paths."""


def test_paths_in_a_moved_store_are_updated_and_others_are_unchanged(
    store: Store,
    begin: Callable[..., HistoryWriter],
    make_artifact: Callable[..., tuple[Path, Manifest]],
    tmp_path: Path,
) -> None:
    folder, manifest = make_artifact("train_sft", "5f")
    elsewhere, other = tmp_path / "downloads" / "train_sft-0", manifest
    shutil.copytree(folder, elsewhere)
    writer = begin("one")
    for artifact_folder, made in ((folder, manifest), (elsewhere, other)):
        node = writer.begin_node("train_sft", task="t.train_sft", kind="task")
        output = as_value("o0", "Checkpoint", "", artifact_folder.name)
        deck = str(artifact_folder / "deck.html")
        writer.end_node(
            node,
            NodeEnd("succeeded", outputs=[output], made=[(artifact_folder, made)], deck_path=deck),
        )
    writer.end("succeeded")

    moved = Store(store.root.rename(tmp_path / "other folder"))
    with History(moved) as history:
        assert Path(history.execution("one").log_path) == moved.runs / "one" / "run.log"
        decks = [Path(node.deck_path) for node in history.nodes("one")]
        assert decks == [moved.artifacts / folder.name / "deck.html", elsewhere / "deck.html"]
        assert Path(history.artifact(folder.name).path) == moved.artifacts / folder.name
        assert Path(history.artifact("train_sft-0").path) == elsewhere
        (ancestor,) = history.ancestry(folder.name).artifacts
        assert ancestor.state == "found"
        assert Path(ancestor.artifact.path) == moved.artifacts / folder.name


def test_absolute_paths_of_an_older_file_become_relative_to_the_store(store: Store) -> None:
    """The store was in `/old/artifacts/store` when it was written, and was moved."""
    old = "/old/artifacts/store"
    _old_file(store.root / "history.db", old)
    with History(store) as history:
        assert Path(history.execution("one").log_path) == store.runs / "one" / "run.log"
        assert history.execution("imported").log_path == ""
        assert [node.deck_path for node in history.nodes("one")] == [
            str(store.artifacts / "a" / "deck.html"),
            "/old/artifacts/store-2/a/deck.html",
            "",
        ]
        assert Path(history.artifact("a").path) == store.artifacts / "a"
        assert history.artifact("b").path == "/downloads/artifacts/b"


def _old_file(path: Path, root: str) -> None:
    path.parent.mkdir(parents=True)
    database = sqlite3.connect(path)
    for script in SCRIPTS[:WITH_WHOLE_PATHS]:
        database.executescript(script)
    for execution, log in (("one", f"{root}/runs/one/run.log"), ("imported", "")):
        database.execute(
            "INSERT INTO executions (id, workflow, recipe, state, started_at, command, inputs, "
            "packages, machine, source_digest, pid, process_started, log_path) "
            "VALUES (?, 'w.w', '', 'succeeded', 1.0, '[]', '{}', '{}', '{}', '', 1, 1.0, ?)",
            (execution, log),
        )
    for deck in (f"{root}/artifacts/a/deck.html", f"{root}-2/a/deck.html", ""):
        database.execute(
            "INSERT INTO nodes (execution, name, task, kind, state, started_at, deck_path) "
            "VALUES ('one', 'n', 't.n', 'task', 'succeeded', 1.0, ?)",
            (deck,),
        )
    manifest = Manifest(kind="dataset", format="f", stage="s", content_hash="")
    for artifact, folder in (("a", f"{root}/artifacts/a"), ("b", "/downloads/artifacts/b")):
        database.execute(
            "INSERT INTO artifacts VALUES (?, 'dataset', 's', 'f', '', ?, 0, '', ?, NULL)",
            (artifact, folder, manifest.model_dump_json()),
        )
    database.execute(f"PRAGMA user_version = {WITH_WHOLE_PATHS}")
    database.commit()
    database.close()
