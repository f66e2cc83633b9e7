"""Files that a Ray stage in a container puts on the volume of the store, and removes again."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
from flytekit import FlyteContextManager
from flytekit.bin import entrypoint
from flytekit.core.type_engine import TypeEngine
from flytekit.models.literals import Literal, LiteralMap
from flytekit.types.directory import FlyteDirectory

from nemo_rl_core.produce import StageInputs, StageResult, produce
from nemo_rl_core.store import locks
from nemo_rl_core.store.manifest import Manifest, StageRun
from nemo_rl_core.store.store import Store
from tasks.artifacts import DatasetArtifact
from tasks.pods.resources import TRAIN
from tasks.pods.shapes import laptop
from tasks.ray_cluster.ray_stage import RayStage, RayStageTask

REMOTE = "memory://bucket/parent"
SEEN: list[tuple[Path, str]] = []


def read(parent: FlyteDirectory) -> FlyteDirectory:
    """Stage that passes a path to workers, and returns a folder."""
    folder = Path(parent)
    SEEN.append((folder, (folder / "model" / "config.json").read_text()))
    if (folder / "broken").exists():
        raise KeyError("broken")
    return FlyteDirectory(str(folder / "model"))


def made(parent: FlyteDirectory) -> DatasetArtifact:
    """Artifacts that a stage publishes, next to one that another process uses."""
    folder = Store.default().artifacts / "made-1"
    folder.mkdir(parents=True)
    (folder / "rows.txt").write_text(Path(parent).joinpath("model", "config.json").read_text())
    return DatasetArtifact(directory=FlyteDirectory(str(folder)), stage="made", content_hash="1")


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RayStageTask:
    """Skips the wait for pods, since there are none here."""
    SEEN.clear()
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path / "volume"))
    monkeypatch.setattr(RayStageTask, "pre_execute", lambda self, params: params)
    return RayStageTask(RayStage(laptop(), TRAIN), read)


def run_as_container(stage: RayStageTask, remote: str, outputs: Path) -> None:
    outputs.mkdir(parents=True)
    context = FlyteContextManager.current_context()
    kind = TypeEngine.to_literal_type(FlyteDirectory)
    value = TypeEngine.to_literal(context, FlyteDirectory(remote), FlyteDirectory, kind)
    assert isinstance(value, Literal)
    inputs = outputs / "inputs.pb"
    inputs.write_bytes(LiteralMap({"parent": value}).to_flyte_idl().SerializeToString())
    with entrypoint.setup_execution(raw_output_data_prefix="memory://bucket/raw"):
        entrypoint._dispatch_execute(
            FlyteContextManager.current_context(), lambda: stage, str(inputs), str(outputs)
        )


def put(**files: str) -> Any:
    bucket = fsspec.filesystem("memory")
    bucket.rm("/bucket", recursive=True) if bucket.exists("/bucket") else None
    for name, text in files.items():
        bucket.pipe(f"/bucket/parent/{name.replace('__', '/')}", text.encode())
    return bucket


@pytest.mark.parametrize("broken", [False, True])
def test_inputs_are_in_the_store_while_the_stage_runs(
    stage: RayStageTask, tmp_path: Path, broken: bool
) -> None:
    bucket = put(**{"model__config.json": "{}", **({"broken": ""} if broken else {})})
    run_as_container(stage, REMOTE, tmp_path / "out")
    ((folder, text),) = SEEN
    assert text == "{}"
    assert folder.is_relative_to(tmp_path / "volume" / "inputs")
    assert not folder.exists()
    assert list((tmp_path / "volume" / "inputs").iterdir()) == []
    assert (tmp_path / "out" / "error.pb").exists() == broken
    uploaded = [path for path in bucket.find("/bucket/raw") if path.endswith("config.json")]
    assert len(uploaded) == (not broken)


def test_files_of_killed_attempts_are_removed_a_day_later(
    stage: RayStageTask, tmp_path: Path
) -> None:
    put(**{"model__config.json": "{}"})
    inputs = tmp_path / "volume" / "inputs"
    for name in ("old", "young", "running"):
        (inputs / name).mkdir(parents=True)
        (inputs / f"{name}.lock").touch()
    two_days_ago = time.time() - 48 * 3600
    with locks.locked(inputs / "running.lock", "another stage"):
        for name in ("old", "running"):
            os.utime(inputs / f"{name}.lock", (two_days_ago, two_days_ago))
        run_as_container(stage, REMOTE, tmp_path / "out")
        left = sorted(path.name for path in inputs.iterdir())
    assert left == ["running", "running.lock", "young", "young.lock"]


@pytest.mark.parametrize("is_used", [False, True])
def test_uploaded_artifacts_leave_the_volume(
    stage: RayStageTask, tmp_path: Path, is_used: bool
) -> None:
    bucket = put(**{"model__config.json": "{}"})
    publishing = RayStageTask(RayStage(laptop(), TRAIN), made)
    script = "import sys; from pathlib import Path; from nemo_rl_core.store import locks; "
    script += "locks.share(Path(sys.argv[1]), 'artifacts/made-1'); print(flush=True); input()"
    marks = Store.default().marks
    marks.parent.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(
        [sys.executable, "-c", script, marks], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        other.stdout.readline()
        if not is_used:
            other.communicate(b"\n")
        run_as_container(publishing, REMOTE, tmp_path / "out")
    assert not (tmp_path / "out" / "error.pb").exists()
    assert [bucket.cat(p) for p in bucket.find("/bucket/raw") if p.endswith("rows.txt")] == [b"{}"]
    assert (Store.default().artifacts / "made-1").exists() == is_used


@pytest.mark.parametrize("used_by", ["another execution", "this execution", "another process"])
def test_an_artifact_of_an_earlier_execution_is_made_again(own_store: Path, used_by: str) -> None:
    """Like `--overwrite-cache`; an artifact of an earlier attempt of this execution is used."""
    made = []

    def work(folder: Path) -> StageResult:
        made.append(folder)
        (folder / "rows.txt").write_text("rows")
        return StageResult("dataset", "text")

    def run_in(execution: str) -> Path:
        run = StageRun(execution=execution, workflow="", task="", attempt=1, started_at=0.0)
        return produce(StageInputs("made", {}), work, run=run)

    left = run_in("first")
    store = Store.default()
    if used_by != "another process":
        store.release()  # its process has ended before the upload
    assert run_in("first" if used_by == "this execution" else "second") == left
    assert len(made) == 1 + (used_by == "another execution")
    made_by = Manifest.read(left).run
    assert made_by is not None
    assert made_by.execution == ("second" if used_by == "another execution" else "first")
