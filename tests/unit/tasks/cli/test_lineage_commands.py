"""`nemo-rl runs`, `lineage`, `card` and `reproduce` on a small real run."""

import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner, Result
from flytekit import workflow

import workflows
from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.errors import StoreError
from nemo_rl_core.history.database import path_of
from nemo_rl_core.history.queries import History
from nemo_rl_core.produce import StageResult
from nemo_rl_core.store.aliases import Aliases
from nemo_rl_core.store.machine import Machine
from nemo_rl_core.store.store import Store
from tasks.artifacts import Checkpoint, CheckpointArtifact, Dataset, DatasetArtifact
from tasks.cli.models.card import card
from tasks.cli.records.lineage import lineage
from tasks.cli.records.reproduce import reproduce
from tasks.cli.records.runs import runs
from tasks.local_run.run import RunFailed
from tasks.reproduce.differences import differences_from, differences_of_making
from tasks.stage.stage import cached_task, make

assert workflows  # wraps flytekit's local execution when it is imported


class Rate(FrozenConfig):
    rate: float = 0.1
    steps: int = 2


@cached_task(deck_fields=())
def rows(config: Rate) -> Dataset:
    def work(folder: Path) -> StageResult:
        (folder / "rows.txt").write_text("rows")
        return StageResult("dataset", "text", "1 row")

    return DatasetArtifact(**make(__name__, "rows", config=config, parents={}, work=work))


@cached_task(deck_fields=())
def tune(config: Rate, train: Dataset, iteration: int) -> Checkpoint:
    def work(folder: Path) -> StageResult:
        if config.steps == 0:
            raise ValueError("no steps")
        (folder / "model").mkdir()
        (folder / "model" / "weights.txt").write_text(str(config.rate))
        return StageResult("checkpoint", "text", "tuned", num_tokens=7, step=config.steps)

    fields = make(
        __name__, "tune", config=config, parents={"train": train}, work=work, part=str(iteration)
    )
    return CheckpointArtifact(**fields)


@cached_task(deck_fields=())
def tune_more(config: Rate, start: Checkpoint) -> Checkpoint:
    def work(folder: Path) -> StageResult:
        (folder / "model").mkdir()
        (folder / "model" / "weights.txt").write_text(f"{config.rate} more")
        return StageResult("checkpoint", "text", "tuned", num_tokens=7, step=4)

    return CheckpointArtifact(
        **make(__name__, "tune_more", config=config, parents={"start": start}, work=work)
    )


@workflow
def both(first: Rate, second: Rate) -> Checkpoint:
    start = tune(config=first, train=rows(config=first), iteration=1)
    return tune_more(config=second, start=start)


class Ran(NamedTuple):
    store: Path
    artifact: CheckpointArtifact


@pytest.fixture
def ran(own_store: Path) -> Ran:
    return Ran(own_store, both(first=Rate(), second=Rate(rate=0.5)))


def ask(command: object, *words: str) -> Result:
    result = CliRunner(env={"COLUMNS": "40"}).invoke(command, words)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_tree_goes_back_to_the_data(ran: Ran) -> None:
    name = ran.artifact.folder.name
    model = ran.artifact.folder / "model"
    (model / "config.json").write_text("{}")
    Aliases(Store.default()).move("best", name)
    for words in (name, name[:13], "alias:best", str(model), ran.artifact.content_hash):
        shown = ask(lineage, words).output
        assert f"tune_more  {name}  content {ran.artifact.content_hash[:16]}" in shown
    assert "config against tune 1: rate: 0.1 → 0.5" in shown
    assert "start: tune 1  tune-" in shown
    assert "train: rows  rows-" in shown
    assert "7 tokens" in shown and "run 20" in shown


def test_a_folder_of_another_store_contains_its_ancestry(
    ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = json.loads(ask(lineage, ran.artifact.folder.name, "--json").output)
    monkeypatch.chdir(tmp_path)
    # A name that an artifact of the store begins with, and the path of another store.
    shutil.copytree(ran.artifact.folder, "rows")
    for store in ("", str(tmp_path / "empty")):
        for words in ("rows", "rows/model", str(tmp_path / "rows" / "model" / "weights.txt")):
            options = ["--store", store] if store else []
            result_json = json.loads(ask(lineage, words, "--json", *options).output)
            assert result_json["root"] == here["root"], words
            for key in ("id", "content_hash", "depth"):
                assert [each[key] for each in result_json["artifacts"]] == [
                    each[key] for each in here["artifacts"]
                ]
            assert result_json["parentage"] == here["parentage"]


def test_the_graph_as_json(ran: Ran) -> None:
    graph = json.loads(ask(lineage, ran.artifact.folder.name, "--json").output)
    assert graph["root"] == ran.artifact.folder.name
    assert [each["depth"] for each in graph["artifacts"]] == [0, 1, 2]
    assert [each["role"] for each in graph["parentage"]] == ["start", "train"]


def test_events_to_a_file(ran: Ran, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    shown = ask(lineage, ran.artifact.folder.name, "--openlineage", str(path)).output
    assert shown.startswith("6 events")
    assert len(path.read_text().splitlines()) == 6


def test_runs_are_listed_and_shown(ran: Ran) -> None:
    with pytest.raises(RunFailed):
        both(first=Rate(steps=0), second=Rate())
    page = json.loads(ask(runs, "--json").output)
    assert [each["state"] for each in page["items"]] == ["failed", "succeeded"]
    first = page["items"][1]["id"]
    assert first in ask(runs, "--state", "succeeded").output
    assert first not in ask(runs, "--state", "failed").output
    # For a pipe, which has no width, rich would cut the table at 80 columns.
    listed = ask(runs).output
    assert all(each["id"] in listed for each in page["items"]) and "…" not in listed
    shown = ask(runs, first).output
    assert "tune_more" in shown and "succeeded" in shown
    failed = ask(runs, page["items"][0]["id"]).output
    assert "no steps" in failed
    with pytest.raises(StoreError, match="no record of 'nowhere'"):
        ask(runs, "nowhere")


def test_a_card_to_a_file(ran: Ran, tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    ask(card, ran.artifact.folder.name, "--output", str(path), "--name", "Tuned")
    assert "# Tuned" in path.read_text()
    assert "**tune_more**" in path.read_text()


def test_differences_of_machines_are_named_with_their_effect(ran: Ran) -> None:
    with History(Store.default()) as history:
        execution = history.maker(history.find_artifact(ran.artifact.folder.name))
    assert execution is not None
    assert differences_from(execution).bits == ()
    here = Machine.current()
    then = here.model_dump() | {
        "cpu_model": "another",
        "instruction_set": f"{here.instruction_set} amx_of_then",
        "threads": here.threads + 6,
    }
    assert differences_from(replace(execution, machine=then)).bits == (
        f"the processor was another and is {here.cpu_model}",
        "its vector extensions differ (only then amx_of_then, only now none)",
        f"libraries took {here.threads + 6} threads and take {here.threads}",
    )
    older = {"cpu_model": here.cpu_model, "cores": here.cores}  # the fields of older records
    assert differences_from(replace(execution, machine=older)).bits == ()


def test_machines_of_workers_are_compared() -> None:
    here = Machine.current()
    then, now = (
        here.model_copy(
            update={"processes": {"training": {"threads": "1", "cpu_capability": each}}}
        )
        for each in ("AVX2", "AVX512")
    )
    assert differences_of_making(then, then) == ()
    assert differences_of_making(then, now) == (
        "cpu_capability in training was AVX2 and is AVX512",
    )
    assert differences_of_making(then, here) == ()  # without processes
    more = {"processes": {"training": {**then.processes["training"], "gpu": "H100"}}}
    assert differences_of_making(then, then.model_copy(update=more)) == (
        "gpu in training was none and is H100",
    )


def test_variables_of_workers_are_compared() -> None:
    plain = Machine(cpu_model="any", cores=2)
    head = plain.model_copy(update={"variables": {"NVIDIA_TF32_OVERRIDE": "0"}})
    worker = {"training": {"threads": "1", "NVIDIA_TF32_OVERRIDE": "0"}}
    then, now = head.with_processes(worker), plain.with_processes(worker)
    assert differences_of_making(
        then, now
    ) == (  # variables of the heads; those of workers are equal
        "variables that choose kernels were NVIDIA_TF32_OVERRIDE=0 and are none",
    )
    without = head.with_processes({"training": {"threads": "1"}})
    assert differences_of_making(then, without) == (
        "NVIDIA_TF32_OVERRIDE in training was 0 and is none",
    )
    older = head.model_copy(update={"processes": {"training": {"threads": "1"}}})
    assert differences_of_making(older, without) == ()


def test_a_run_on_another_machine_prints_why_bits_may_differ(ran: Ran, tmp_path: Path) -> None:
    store = Store.default()
    with closing(sqlite3.connect(path_of(store))) as database:
        machine = json.dumps(Machine.current().model_dump() | {"cpu_model": "another"})
        database.execute("UPDATE executions SET machine = ?", (machine,))
        database.commit()
    used = tmp_path / "used"
    used.mkdir()
    (used / "file").touch()
    result = CliRunner().invoke(reproduce, [ran.artifact.folder.name, "--store", str(used)])
    assert "note: the processor was another and is" in result.stderr
    assert "note: bits are the same on machines of one kind" in result.stderr


def test_reproduce_refuses_runs_that_cannot_be_the_same(
    ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = tmp_path / "site" / "torch-0.1.dist-info"
    older.mkdir(parents=True)
    (older / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.1\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(older.parent)
        with pytest.raises(StoreError, match=r"torch was 2\.[^;]* and is 0\.1"):
            ask(reproduce, ran.artifact.folder.name)
    used = tmp_path / "used"
    used.mkdir()
    (used / "file").touch()
    with pytest.raises(StoreError, match="not empty"):
        ask(reproduce, ran.artifact.folder.name, "--anyway", "--store", str(used))


def test_a_card_of_something_else_than_a_model_is_refused(ran: Ran) -> None:
    (data,) = (ran.store / "artifacts").glob("rows-*")
    with pytest.raises(StoreError, match=f"{data.name} is not a model"):
        ask(card, data.name)
    assert "library_name: transformers" in ask(card, ran.artifact.folder.name).output
