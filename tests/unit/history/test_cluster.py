"""Records that stages write on a cluster, brought together on another machine."""

import json
import shutil
from pathlib import Path

import pytest

from nemo_rl_core.errors import StoreError
from nemo_rl_core.history.cluster import import_folders
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.stage_run import recorded
from nemo_rl_core.infra.metrics import MetricsFile
from nemo_rl_core.infra.produce import Inputs, Made, produce
from nemo_rl_core.infra.store import Store
from nemo_rl_core.types import StepReport

CONTAINER = {
    "FLYTE_INTERNAL_EXECUTION_ID": "a1b2",
    "FLYTE_INTERNAL_EXECUTION_WORKFLOW": "workflows.sft.sft",
    "FLYTE_ATTEMPT_NUMBER": "1",
}


def stage(name: str, environment: dict[str, str], **parents: Path) -> Path:
    """A stage as `tasks.stage.make` runs it."""

    def work(folder: Path) -> Made:
        (folder / "text.txt").write_text(name)
        MetricsFile(folder / "metrics.jsonl").append(
            StepReport(name, 1, 1, {"loss": 0.5, "global_step": 7.0})
        )
        return Made("checkpoint", "text")

    task = f"tasks.{name}.{name}"
    inputs = Inputs(name, {}, parents=parents)
    return produce(inputs, recorded(work, environment, task=task, parents=parents))


@pytest.fixture
def downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path / "pod"))
    rows = stage("prepare_data", CONTAINER)
    trained = stage("train_sft", CONTAINER, train=rows)
    folders = []
    for each in (trained, rows):
        folders.append(tmp_path / "downloaded" / each.name)
        shutil.copytree(each, folders[-1])
    return folders


def test_stages_of_a_cluster_become_a_run(store: Store, downloaded: list[Path]) -> None:
    for _ in range(2):  # the second time there is nothing left to add
        assert import_folders(store, downloaded) == {"a1b2"}
    with History(store) as history:
        (run,) = history.executions().items
        assert (run.id, run.workflow, run.state) == ("a1b2", "workflows.sft.sft", "succeeded")
        rows, trained = history.nodes("a1b2")
        assert (rows.name, trained.task) == ("prepare_data", "tasks.train_sft.train_sft")
        (edge,) = history.edges("a1b2")
        assert (edge.source, edge.target, edge.target_input) == (rows.id, trained.id, "train")
        assert history.node(trained.id).attempts[0].number == 2
        assert history.metrics(trained.id)["loss"] == [(7, 0.5)]
        graph = history.ancestry(downloaded[0].name)
        assert [each.execution for each in graph.artifacts] == ["a1b2", "a1b2"]
        assert graph.parentage[0].role == "train"


def test_the_record_is_no_part_of_the_content(
    downloaded: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path / "laptop"))
    local = stage("prepare_data", {})
    assert not (local / "run.json").exists()

    def digest(folder: Path) -> str:
        return str(json.loads((folder / "manifest.json").read_text())["content_hash"])

    assert digest(local) == digest(downloaded[1])


def test_a_folder_without_a_record_is_refused(store: Store, downloaded: list[Path]) -> None:
    (downloaded[0] / "run.json").write_text("{")
    with pytest.raises(StoreError, match="no record of a run on a cluster"):
        import_folders(store, downloaded)
