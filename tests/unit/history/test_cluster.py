"""Records that stages write on a cluster, imported on another machine."""

import shutil
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from nemo_rl_core.errors import StoreError
from nemo_rl_core.history.ancestry import folder_ancestry
from nemo_rl_core.history.cluster import import_folders
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import Parentage
from nemo_rl_core.produce import StageInputs, StageResult, produce
from nemo_rl_core.store.manifest import Manifest, StageRun
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.metrics import MetricsFile
from nemo_rl_core.types import StepReport
from nemo_rl_core.ui.app import create_app

CONTAINER = {
    "FLYTE_INTERNAL_EXECUTION_ID": "a1b2",
    "FLYTE_INTERNAL_EXECUTION_WORKFLOW": "workflows.sft.sft",
    "FLYTE_ATTEMPT_NUMBER": "1",
}


def stage(name: str, environment: dict[str, str], **parents: Path) -> Path:
    """Runs a stage like `tasks.stage.stage.make`."""

    def work(folder: Path) -> StageResult:
        (folder / "text.txt").write_text(name)
        MetricsFile(folder / "metrics.jsonl").append(
            StepReport(name, 1, 1, {"loss": 0.5, "global_step": 7.0})
        )
        return StageResult("checkpoint", "text")

    run = StageRun.from_environment(environment, task=f"tasks.{name}.{name}")
    return produce(StageInputs(name, {}, parents=parents), work, run=run)


def download(
    folder: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str] = CONTAINER
) -> dict[str, Path]:
    """Downloads a checkpoint and its data into folders with other names, like in each pod."""
    folders = {}
    before: dict[str, Path] = {}
    for name, role in (("prepare_data", "train"), ("train_sft", "policy")):
        monkeypatch.setenv("NEMO_RL_HOME", str(folder / f"pod of {name}"))
        made = stage(name, environment, **before)
        folders[name] = folder / "downloaded" / f"7f{len(folders)}"
        shutil.move(made, folders[name])
        passed_on = folder / "tmp" / f"in the next pod {len(folders)}"
        shutil.copytree(folders[name], passed_on)
        before = {role: passed_on}
    shutil.rmtree(folder / "tmp")
    return folders


@pytest.fixture
def downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    return download(tmp_path, monkeypatch)


def name_of(folder: Path) -> str:
    return Manifest.read(folder).name


def test_stages_of_a_cluster_become_a_run(store: Store, downloaded: dict[str, Path]) -> None:
    folders = list(downloaded.values())[::-1]
    for _ in range(2):  # the second import adds nothing
        assert import_folders(store, folders) == {"a1b2"}
    with History(store) as history:
        (run,) = history.executions().items
        assert (run.id, run.workflow, run.state) == ("a1b2", "workflows.sft.sft", "succeeded")
        rows, trained = history.nodes("a1b2")
        assert (rows.name, trained.task) == ("prepare_data", "tasks.train_sft.train_sft")
        (edge,) = history.edges("a1b2")
        assert (edge.source, edge.target, edge.target_input) == (rows.id, trained.id, "train")
        assert history.node(trained.id).attempts[0].number == 2
        assert history.metrics(trained.id)["loss"] == [(7, 0.5)]
        graph = history.ancestry(name_of(downloaded["train_sft"]))
        assert [each.execution for each in graph.artifacts] == ["a1b2", "a1b2"]
        assert [each.state for each in graph.artifacts] == ["found", "found"]
        assert graph.parentage == (
            Parentage(
                name_of(downloaded["prepare_data"]), name_of(downloaded["train_sft"]), "train"
            ),
        )
        assert history.find_artifact(str(downloaded["train_sft"])).id == graph.root


def test_points_of_a_sweep_keep_their_settings(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path / "pod"))
    run = StageRun.from_environment(CONTAINER, task="tasks.sweep_point.sweep_point")
    folders = [
        produce(
            StageInputs("sweep_point", {"point": point}),
            lambda _: StageResult("sweep_point", "json"),
            run=run,
        )
        for point in ({"seed": 0}, {"seed": 1}, "no settings")
    ]
    import_folders(store, folders)
    with History(store) as history:
        points = [node.point for node in history.nodes("a1b2")]
    assert sorted(points, key=str) == [{"seed": 0}, {"seed": 1}, {}]


def test_one_folder_is_enough_for_its_ancestors(store: Store, downloaded: dict[str, Path]) -> None:
    trained, rows = downloaded["train_sft"], downloaded["prepare_data"]
    aside = rows.rename(rows.with_name("aside"))
    assert import_folders(store, [trained]) == {"a1b2"}
    with History(store) as history:
        assert [node.name for node in history.nodes("a1b2")] == ["prepare_data", "train_sft"]
        graph = history.ancestry(name_of(trained))
        assert [each.state for each in graph.artifacts] == ["found", "missing"]
        assert [each.execution for each in graph.artifacts] == ["a1b2", "a1b2"]
        assert history.metrics(history.nodes("a1b2")[0].id) == {}
    # Also without any store.
    assert [
        (each.id, each.content_hash, each.depth, each.execution, each.state)
        for each in folder_ancestry(trained).artifacts
    ] == [
        (each.id, each.content_hash, each.depth, each.execution, each.state)
        for each in graph.artifacts
    ]
    assert folder_ancestry(trained).parentage == graph.parentage

    # Later downloads are added.
    import_folders(store, [aside])
    with History(store) as history:
        later = history.ancestry(name_of(trained))
        assert [each.state for each in later.artifacts] == ["found", "found"]
        assert history.metrics(history.nodes("a1b2")[0].id)["loss"] == [(7, 0.5)]
        assert len(history.nodes("a1b2")) == 2


def test_two_runs_with_identical_artifacts_have_separate_records(
    store: Store, downloaded: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = {**CONTAINER, "FLYTE_INTERNAL_EXECUTION_ID": "c3d4"}
    later = download(tmp_path / "later", monkeypatch, again)
    assert import_folders(store, [downloaded["train_sft"]]) == {"a1b2"}
    assert import_folders(store, list(later.values())) == {"c3d4"}
    with History(store) as history:
        for run in ("a1b2", "c3d4"):
            rows, trained = history.nodes(run)
            (edge,) = history.edges(run)
            assert (edge.source, edge.target) == (rows.id, trained.id)
            assert trained.ended_at is not None and trained.ended_at >= trained.started_at
        # Present artifacts keep their path; others get that of the import.
        graph = history.ancestry(name_of(later["train_sft"]))
        assert [each.execution for each in graph.artifacts] == ["a1b2", "a1b2"]
        paths = [each.artifact.path for each in graph.artifacts if each.artifact]
        assert paths == [str(downloaded["train_sft"]), str(later["prepare_data"])]


def test_data_of_a_local_run_is_an_ancestor_too(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path / "laptop"))
    rows = stage("prepare_data", {})
    trained = stage("train_sft", CONTAINER, train=rows)
    assert import_folders(store, [trained]) == {"a1b2"}
    with History(store) as history:
        data = history.ancestry(trained.name).artifacts[1]
        assert (data.id, data.execution) == (rows.name, None)
        assert data.artifact is not None and data.artifact.stage == "prepare_data"


def test_the_page_shows_the_deck_of_a_downloaded_stage(
    store: Store, downloaded: dict[str, Path]
) -> None:
    import_folders(store, [downloaded["train_sft"]])
    (downloaded["train_sft"] / "deck.html").write_text("a deck from afar")
    client = TestClient(create_app(store), base_url="http://localhost")
    with History(store) as history:
        rows, trained = history.nodes("a1b2")
    assert client.get(f"/nodes/{trained.id}/deck").text.endswith("a deck from afar")
    assert client.get(f"/nodes/{rows.id}/deck").status_code == 404


def test_the_maker_is_not_part_of_the_content(
    downloaded: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path / "laptop"))
    local, remote = Manifest.read(stage("prepare_data", {})), downloaded["prepare_data"]
    assert (local.content_hash, local.name) == (
        Manifest.read(remote).content_hash,
        name_of(remote),
    )
    assert local.run is None


def test_an_artifact_of_a_local_run_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path / "laptop"))
    with pytest.raises(StoreError, match="was not made on a cluster"):
        import_folders(store, [stage("prepare_data", {})])
