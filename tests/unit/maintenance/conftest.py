"""A small store with runs, artifacts and a history, made by the code that real runs use."""

import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.history.database import open_for_writing
from nemo_rl_core.history.inserts import as_value
from nemo_rl_core.history.writer import HistoryWriter, NewExecution, NodeEnd
from nemo_rl_core.store import files
from nemo_rl_core.store.manifest import Manifest, config_hash
from nemo_rl_core.store.store import VOLATILE, Store

NOW = time.time()
DAY = 86400.0


@dataclass(frozen=True)
class SmallStore:
    """Makes artifacts and runs in a store."""

    store: Store

    def artifact(
        self, stage: str, *parents: str, days_old: float = 0.0, kib: int = 1, **config: Any
    ) -> str:
        """Publishes an artifact through a work folder and returns its name."""
        key = f"{len(list(self.store.work.glob('*.lock'))):032x}"
        with self.store.work_folder(stage, key) as folder:
            (folder / "rows").write_bytes(os.urandom(1024 * kib))
            (folder / "model").mkdir()
            (folder / "model" / "weights").write_text(key)
            (folder / "summary.txt").write_text("")
            made = datetime.fromtimestamp(NOW - days_old * DAY, UTC)
            paths = [self.store.artifacts / parent for parent in parents]
            Manifest(
                kind="checkpoint",
                format="hf",
                stage=stage,
                content_hash=files.hash_folder(folder, exclude=VOLATILE),
                weights_hash=files.hash_folder(folder / "model"),
                config=config,
                config_hash=config_hash(config),
                parents=tuple(Manifest.read(path).ref(path) for path in paths),
                created_at=made.isoformat(timespec="seconds"),
            ).write(folder)
            digest = f"{key[-8:]}{'0' * 24}"
            return self.store.publish(folder, stage=stage, content_hash=digest).name

    def run(self, name: str, *artifacts: str, days_old: float, **inputs: Any) -> str:
        """Records a finished run that used these artifacts."""
        (self.store.runs / name).mkdir(parents=True)
        (self.store.runs / name / "run.log").write_text("done\n")
        writer = HistoryWriter(self.store, name)
        writer.begin(
            NewExecution(
                workflow="workflows.grpo.grpo",
                recipe="",
                command=[],
                inputs=inputs,
                log_path=self.store.runs / name / "run.log",
            )
        )
        for artifact in artifacts:
            node = writer.begin_node(artifact, task="tasks.x.x", kind="task")
            folder = self.store.artifacts / artifact
            output = as_value("o0", "Checkpoint", {}, artifact)
            made = [(folder, Manifest.read(folder))]
            writer.end_node(node, NodeEnd("succeeded", outputs=[output], made=made))
        writer.end("succeeded")
        began = NOW - days_old * DAY
        with closing(open_for_writing(self.store)) as database:
            database.execute("UPDATE executions SET started_at = ? WHERE id = ?", (began, name))
        return name

    def artifacts(self) -> set[str]:
        """Returns the names of existing artifacts."""
        return {path.name for path in self.store.artifacts.iterdir()}

    def runs(self) -> set[str]:
        """Returns the names of runs with folders."""
        return {path.name for path in self.store.runs.iterdir()}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallStore]:
    """A store that is also `Store.default()`."""
    store = Store(tmp_path / "store")
    monkeypatch.setenv("NEMO_RL_HOME", str(store.root))
    store.check_writable(min_free_mib=1)
    yield SmallStore(store)
    store.release()


@pytest.fixture
def lineage(small: SmallStore) -> dict[str, str]:
    """Three runs on the same data, 40, 20 and 1 days old; the third continued the second."""
    data = small.artifact("prepare_data", days_old=40)
    first = small.artifact("train_sft", data, days_old=40, kib=100)
    second = small.artifact("train_sft", data, days_old=20, kib=200)
    third = small.artifact("grpo_iteration", second, days_old=1, kib=300)
    small.run("run1", data, first, days_old=40)
    small.run("run2", data, second, days_old=20)
    small.run("run3", third, days_old=1)
    small.store.release()  # the runs are over
    return {"data": data, "first": first, "second": second, "third": third}
