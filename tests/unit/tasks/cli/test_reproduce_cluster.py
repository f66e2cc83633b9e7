"""`nemo-rl reproduce` of an artifact of a cluster: its stages run again from the manifests."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from flytekit.core.checkpointer import SyncCheckpoint

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.errors import StoreError
from nemo_rl_core.history.cluster import import_folders
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.writer import HistoryWriter, NewExecution
from nemo_rl_core.produce import StageResult
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.store import Store
from tasks.artifacts import Checkpoint, CheckpointArtifact, Dataset, DatasetArtifact
from tasks.cli.records.reproduce import _refuse_unknown_code, reproduce
from tasks.stage import stage
from tasks.stage.stage import cached_task, make


class Rate(FrozenConfig):
    rate: float = 0.1


@cached_task(deck_fields=())
def rows(config: Rate) -> Dataset:
    def work(folder: Path) -> StageResult:
        (folder / "rows.txt").write_text("rows")
        return StageResult("dataset", "text", "1 row")

    return DatasetArtifact(**make(__name__, "rows", config=config, parents={}, work=work))


@cached_task(deck_fields=())
def tune(
    config: Rate, train: Dataset, iteration: int, start: Checkpoint | None = None
) -> Checkpoint:
    def work(folder: Path) -> StageResult:
        before = (start.model_folder / "weights.txt").read_text() if start else ""
        (folder / "model").mkdir()
        noise = os.environ.get("NOISE", "")  # not in any key
        (folder / "model" / "weights.txt").write_text(f"{before}{config.rate} {iteration}{noise}\n")
        return StageResult("checkpoint", "text", "tuned", step=iteration)

    parents = {"train": train} | ({"start": start} if start else {})
    fields = make(__name__, "tune", config=config, parents=parents, work=work, part=str(iteration))
    return CheckpointArtifact(**fields)


@pytest.fixture
def downloaded(own_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The last of three stages of a cluster; no store has the others."""
    with monkeypatch.context() as container:
        container.setenv("FLYTE_INTERNAL_EXECUTION_ID", "a1b2")
        container.setenv("FLYTE_INTERNAL_EXECUTION_WORKFLOW", "workflows.tune.tune")
        (tmp_path / "saves").mkdir()
        parameters = SimpleNamespace(checkpoint=SyncCheckpoint(str(tmp_path / "saves")))
        container.setattr(stage, "current_context", lambda: parameters)
        data = rows.task_function(config=Rate(rate=0.5))
        first = tune.task_function(config=Rate(rate=0.5), train=data, iteration=1)
        last = tune.task_function(config=Rate(rate=0.25), train=data, iteration=2, start=first)
        folder = tmp_path / "downloaded"
        shutil.copytree(last.folder, folder)
    shutil.rmtree(own_store)
    return folder


def ask(*words: str) -> Result:
    return CliRunner().invoke(reproduce, words)


def stages_in(store: Path) -> set[str]:
    paths = (store / "artifacts").glob("*/manifest.json")
    return {str(json.loads(path.read_text())["stage"]) for path in paths}


@pytest.mark.slow
def test_a_downloaded_artifact_is_reproduced_from_its_manifests(
    downloaded: Path, tmp_path: Path
) -> None:
    """The artifact is reproduced without a store that has a record of its run."""
    again = ask(str(downloaded), "--store", str(tmp_path / "new"))
    assert again.exit_code == 0, (again.output, again.exception)
    assert "running rows, tune 1, tune 2 again" in again.output
    assert f"bitwise identical: {Manifest.read(downloaded).name}" in again.output
    assert stages_in(tmp_path / "new") == {"rows", "tune 1", "tune 2"}


@pytest.mark.slow
def test_a_remote_ancestor_is_compared_by_its_hash(downloaded: Path, tmp_path: Path) -> None:
    import_folders(Store.default(), [downloaded])
    (first,) = [p.name for p in Manifest.read(downloaded).parents if p.stage == "tune 1"]
    again = ask(first, "--store", str(tmp_path / "new"))
    assert again.exit_code == 0, (again.output, again.exception)
    assert f"bitwise identical: {first}" in again.output
    assert stages_in(tmp_path / "new") == {"rows", "tune 1"}, "it stops after what was asked for"


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "ends"), [("", 0), ("!", 1)])
def test_other_machines_are_named_in_any_case(
    downloaded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noise: str, ends: int
) -> None:
    manifest = Manifest.read(downloaded)
    machine = manifest.machine.model_copy(update={"cpu_model": "another"})
    manifest.model_copy(update={"machine": machine}).write(downloaded)
    monkeypatch.setenv("NOISE", noise)
    again = ask(str(downloaded), "--store", str(tmp_path / "new"))
    assert again.exit_code == ends, (again.output, again.exception)
    words = {0: ("bitwise identical", "made by"), 1: ("DIFFERENT", "why:")}[ends]
    assert words[0] in again.output
    here = Manifest.read(next((tmp_path / "new" / "artifacts").iterdir())).machine
    assert f"  {words[1]} the processor was another and is {here.cpu_model}" in again.output


def test_differences_are_printed_before_anything_runs(downloaded: Path, tmp_path: Path) -> None:
    manifest = Manifest.read(downloaded)
    machine = manifest.machine.model_copy(
        update={
            "driver": "570.86.15",
            "threads": manifest.machine.threads + 6,
            "variables": {"ATEN_CPU_CAPABILITY": "default"},
        }
    )
    changed = {"source_digest": "another", "machine": machine, "git_commit": "c0ffee"}
    manifest.model_copy(update=changed).write(downloaded)
    refused = ask(str(downloaded), "--store", str(tmp_path / "new"))
    assert "the source of tune 2 differs" in str(refused.exception)
    assert "the commit was c0ffee" in refused.stderr
    assert "the driver of its GPUs was 570.86.15 and is" in refused.stderr
    threads = machine.threads
    assert f"libraries took {threads} threads and take {threads - 6}" in refused.stderr
    were = "variables that choose kernels were ATEN_CPU_CAPABILITY=default"
    assert f"{were} and are OMP_NUM_THREADS=" in refused.stderr  # set by the tests' conftest
    assert not (tmp_path / "new").exists()


def test_an_ancestor_without_a_record_cannot_be_reproduced(downloaded: Path) -> None:
    (downloaded / "ancestors.json").unlink()
    refused = ask(str(downloaded))
    assert "cannot be made again from its record" in str(refused.exception)


@pytest.mark.parametrize(
    ("section", "code"),
    [
        ({"reward": {"kind": "function", "target": "evil:reward"}}, "evil:reward"),
        ({"isolation": {"generation": {"packages": ["evil==1"]}, "training": None}}, "evil==1"),
        ({"isolation": {"training": {"folder": "/tmp/x", "packages": []}}}, "/tmp/x"),
        ({"isolation": {"training": {"requirements": "/tmp/x.txt"}}}, "/tmp/x.txt"),
    ],
)
def test_code_that_only_a_manifest_names_is_not_run(
    section: dict[str, Any],
    code: str,
    downloaded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest = Manifest.read(downloaded)
    config = {**manifest.config, **section}
    manifest.model_copy(update={"config": config}).write(downloaded)
    (tmp_path / "evil.py").write_text("from pathlib import Path\nPath('marker').touch()\n")
    monkeypatch.chdir(tmp_path)
    import_folders(Store.default(), [downloaded])
    for name in (str(downloaded), manifest.name):
        error = ask(str(name), "--store", str(tmp_path / "new")).exception
        assert "the manifests name code that no record of this user's runs names" in str(error)
        assert code in str(error)
        assert "pass --trust" in str(error)
    assert not (tmp_path / "marker").exists()
    assert not (tmp_path / "new").exists()


def test_a_signed_run_excuses_only_the_code_that_it_names(downloaded: Path) -> None:
    store, manifest = Store.default(), Manifest.read(downloaded)
    inputs = {
        "model": {"name": "org/plain", "trust_remote_code": False},
        "reference": {"name": "org/code", "trust_remote_code": True},
        "over": {"environment.target": ["mine:first", "mine:second"]},
        "isolation": {"training": {"packages": ["six==1.17.0"]}},
    }
    writer = HistoryWriter(store, "2026-01-01")
    writer.begin(NewExecution("workflows.sft.sft", "", (), inputs, store.runs / "log"))
    writer.end("succeeded")
    with History(store) as history:
        run = history.execution("2026-01-01")

    def refuse(config: dict[str, Any]) -> None:
        _refuse_unknown_code(store, run, {"": manifest.model_copy(update={"config": config})})

    refuse({"model": inputs["reference"], "environment": {"target": "mine:second"}})
    refuse({"model": inputs["model"], "isolation": inputs["isolation"]})
    for config in (
        {"model": {"name": "org/plain", "trust_remote_code": True}},
        {"environment": {"target": "org/plain"}},
        {"isolation": {"training": {"packages": ["six==1.16.0"]}}},
    ):
        with pytest.raises(StoreError, match="no record of this user's runs names"):
            refuse(config)
