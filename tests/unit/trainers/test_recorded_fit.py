"""A training started from Python is a run: recorded, shown, logged, tracked and repeatable."""

import io
import json
import os
import pickle
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

from nemo_rl_core.errors import ConfigError
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.signed import is_signed, key_file
from nemo_rl_core.history.writer import HistoryWriter, NewExecution
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.display import PlainDisplay
from nemo_rl_core.telemetry.events import StageRecord
from nemo_rl_core.telemetry.python_output import ProgramOutput, _Printed
from nemo_rl_core.telemetry.run_log import RunLog
from nemo_rl_core.trainers.callbacks import Callback
from nemo_rl_core.trainers.fit.fitting import TrainResult
from nemo_rl_core.ui.app import create_app
from tasks.cli.models.card import card
from tasks.cli.records.lineage import lineage
from tasks.cli.records.reproduce import reproduce
from tasks.cli.records.runs import runs
from tasks.reproduce import reproduction
from tests.training import AddTrainer

REPOSITORY = Path(__file__).resolve().parents[3]
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
STAGES = ["prepare_model", "prepare_data train", "prepare_data validation", "add"]


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path / "store"))
    return Store.default()


def digits(prompt: str, completion: str) -> float:
    return float(completion)


def fit(model: Path, *, reward_fn: Any = digits, num_steps: int = 3, **options: Any) -> TrainResult:
    trainer = AddTrainer.from_pretrained(model, num_steps=num_steps)
    return trainer.fit(ROWS, reward_fn=reward_fn, **options)


def test_fit_is_recorded_as_a_run_with_one_node_per_stage(tiny_model: Path, store: Store) -> None:
    result = fit(tiny_model)
    with History(store) as history:
        (run,) = history.executions().items
        assert (run.workflow, run.state, run.num_nodes) == (
            "tests.training.AddTrainer",
            "succeeded",
            4,
        )
        assert run.inputs["dataset"] == "8 rows in a list"
        assert run.inputs["reward_fn"] == "digits"
        assert run.source_digest
        nodes = history.nodes(run.id)
        assert [(node.name, node.state) for node in nodes] == [(n, "succeeded") for n in STAGES]
        assert nodes[-1].summary.startswith("reward ")
        ids = {node.name: node.id for node in nodes}
        edges = {(edge.source, edge.target_input) for edge in history.edges(run.id)}
        assert {(ids["prepare_model"], "base"), (ids["prepare_data train"], "train")} <= edges
        assert len(history.metrics(ids["add"])["reward"]) == 3
        graph = history.ancestry(result.lineage_id)
        assert {each.execution for each in graph.artifacts} == {run.id}
        assert {each.state for each in graph.artifacts} == {"found"}
        assert result.manifest.source_digest


def test_the_ui_and_commands_show_the_run(tiny_model: Path, store: Store) -> None:
    result = fit(tiny_model, name="mine")
    with History(store) as history:
        (run,) = history.executions().items
        nodes = history.nodes(run.id)
    client = TestClient(create_app(store), base_url="http://127.0.0.1")
    listed = client.get("/").text
    assert run.id in listed
    assert "AddTrainer" in listed
    for tab in ("", "/graph", "/nodes", "/timeline", "/curves", "/log"):
        assert client.get(f"/executions/{run.id}{tab}").status_code == 200, tab
    assert "reward" in client.get(f"/nodes/{nodes[-1].id}").text
    for tab in ("", "/ancestry"):
        assert client.get(f"/artifacts/{result.lineage_id}{tab}").status_code == 200, tab
    shown = CliRunner().invoke(runs, [])
    assert f"{run.id}" in shown.output
    tree = CliRunner().invoke(lineage, [result.lineage_id]).output
    assert tree.count(f"run {run.id}") == 4
    assert "not recorded" not in tree
    written = CliRunner().invoke(card, [result.lineage_id]).output
    assert "8 rows in a list" in written
    assert f"nemo-rl reproduce {result.lineage_id}" in written


@pytest.mark.slow
def test_a_finished_run_of_the_same_name_is_returned(tiny_model: Path, store: Store) -> None:
    first, again, other = fit(tiny_model, name="a"), fit(tiny_model, name="a"), fit(tiny_model)
    assert again.folder == first.folder != other.folder
    with History(store) as history:
        _, hit, maker = history.executions().items
        assert (hit.recipe, hit.state, hit.num_cached) == ("a", "succeeded", 4)
        assert history.maker(history.artifact(first.lineage_id)) == maker


@pytest.mark.slow
def test_training_a_model_of_the_store_keeps_its_lineage(tiny_model: Path, store: Store) -> None:
    (base,) = (p for p in fit(tiny_model).manifest.parents if p.role == "base")
    second = fit(Path(base.path) / "model")
    with History(store) as history:
        ancestors = {each.id for each in history.ancestry(second.lineage_id).artifacts}
    assert base.name in ancestors
    assert len(list(store.artifacts.glob("prepare_model-*"))) == 1


@pytest.mark.slow
def test_another_reward_is_another_run_despite_the_name(tiny_model: Path) -> None:
    def scaled(factor: float) -> Any:
        return lambda prompt, completion: factor * float(completion)

    first = fit(tiny_model, reward_fn=scaled(1.0), name="mine")
    assert fit(tiny_model, reward_fn=scaled(1.0), name="mine").folder == first.folder
    other = fit(tiny_model, reward_fn=scaled(2.0), name="mine")
    assert other.folder != first.folder
    assert other.metrics[0]["reward"] == 2 * first.metrics[0]["reward"]
    assert fit(tiny_model, reward_fn=digits, name="mine").folder not in (first.folder, other.folder)


@pytest.mark.slow
def test_an_interrupted_run_resumes_and_the_record_has_the_step(
    tiny_model: Path, store: Store
) -> None:
    class Stop(Callback):
        def on_step_begin(self, trainer: Any, step: int) -> None:
            if step == 3:
                raise KeyboardInterrupt

    uninterrupted = fit(tiny_model)
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(tiny_model, name="mine", callbacks=[Stop()])
    assert caught.value.__notes__[:2] == [
        "stopped from outside at step 2 of 3 of add",
        "the same call resumes from its last save (name='mine')",
    ]
    resumed = fit(tiny_model, name="mine")
    assert resumed.manifest.weights_hash == uninterrupted.manifest.weights_hash
    with History(store) as history:
        last, stopped, _ = history.executions().items
        assert stopped.state == "stopped"
        assert stopped.error == "stopped from outside at step 2 of 3 of add"
        assert history.nodes(stopped.id)[-1].cost["wall_seconds"] > 0
        (node,) = [node for node in history.nodes(last.id) if node.name == "add"]
        assert history.node(node.id).attempts[0].resumed_from_step == 2
        tokens = [step["num_valid_tokens"] for step in resumed.metrics]
        assert (node.cost["tokens"], resumed.num_tokens) == (tokens[2], sum(tokens))


class Noisy(Callback):
    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        print(f"my step {step}")  # noqa: T201
        os.write(1, b"noise of a library\n")
        os.system("echo noise of a child >&2")
        print("noise on stderr", file=sys.stderr)  # noqa: T201
        ray = threading.Thread(target=print, args=["noise of a worker"], name="ray_print_logs")
        ray.start()
        ray.join()


@pytest.mark.slow
def test_output_of_the_program_appears_and_noise_goes_to_the_log(
    tiny_model: Path, store: Store, capfd: pytest.CaptureFixture[str]
) -> None:
    streams = sys.stdout, sys.stderr
    result = fit(tiny_model, callbacks=[Noisy()])
    assert (sys.stdout, sys.stderr) == streams
    shown = capfd.readouterr()
    assert shown.out.splitlines() == ["my step 1", "my step 2", "my step 3"]
    assert "noise" not in shown.err
    assert "add 3/3  reward" in shown.err
    assert f"model: {result.checkpoint}" in shown.err
    (log,) = store.runs.glob("*/run.log")
    noise = log.read_text()
    for source in ("library", "child", "worker"):
        assert noise.count(f"noise of a {source}\n") == 3
    assert noise.count("noise on stderr\n") == 3


def test_a_stream_kept_by_a_library_works_after_the_run(tiny_model: Path) -> None:
    kept: list[Any] = []

    class Keep(Callback):
        def on_fit_end(self, trainer: Any) -> None:
            kept.extend([sys.stdout, sys.stderr])

    fit(tiny_model, callbacks=[Keep()])
    for stream in kept:
        stream.write("after\n")
        assert stream.isatty() is False


def test_full_lines_are_shown_above_a_live_display() -> None:
    lines: list[str] = []
    after = io.StringIO()
    printed = _Printed(io.StringIO(), io.StringIO(), lines.append)
    printed.write("one\ntw")
    assert lines == ["one"]
    printed.write("o\n")
    printed.write("end")
    printed.end(after)
    printed.write("later\n")
    assert lines == ["one", "two", "end"]
    assert after.getvalue() == "later\n"


def test_the_table_of_stages_is_as_wide_as_its_content_in_a_pipe() -> None:
    stream = io.StringIO()
    record = StageRecord("an algorithm with a long name " * 3, "ran", 1.0, tokens=10)
    ProgramOutput(PlainDisplay(stream), stream).closing([record], [])
    row = next(line for line in stream.getvalue().splitlines() if "an algorithm" in line)
    assert all(cell in row for cell in (record.name, "ran", "1.0", "10"))
    assert "peak GiB" in stream.getvalue()


@pytest.mark.slow
def test_a_failed_run_is_recorded_and_names_its_log(tiny_model: Path, store: Store) -> None:
    class Broken(Callback):
        def on_step_begin(self, trainer: Any, step: int) -> None:
            raise ValueError("no luck")

    with pytest.raises(ValueError, match="no luck") as caught:
        fit(tiny_model, callbacks=[Broken()])
    with History(store) as history:
        (run,) = history.executions().items
        assert (run.state, run.error) == ("failed", "ValueError: no luck")
        assert history.nodes(run.id)[-1].state == "failed"
    assert caught.value.__notes__ == [f"log: {run.log_path}"]
    assert "raise ValueError" in Path(run.log_path).read_text()


@pytest.mark.slow
def test_trackers_get_every_step(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    fit(tiny_model, tracking={"trackers": [{"kind": "jsonl", "path": str(file)}]})
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines if line["stage"] == "add"] == [1, 2, 3]


def test_a_mistake_in_tracking_is_named(tiny_model: Path, store: Store) -> None:
    with pytest.raises(ConfigError, match=r"tracking\.trackers"):
        fit(tiny_model, tracking={"trackers": [{"kind": "wandbb"}]})
    assert not store.runs.exists()


def test_fit_within_a_run_records_no_other_run(tiny_model: Path, store: Store) -> None:
    with RunLog.start(store):
        result = fit(tiny_model)
    assert result.step == 3
    with pytest.raises(Exception, match="no record of any run"):
        History(store)


@pytest.mark.slow
def test_an_unrepeatable_run_names_the_reason(tiny_model: Path) -> None:
    lock = threading.Lock()

    def guarded(prompt: str, completion: str) -> float:
        with lock:
            return float(completion)

    result = fit(tiny_model, reward_fn=guarded)
    done = CliRunner().invoke(reproduce, [result.lineage_id, "--anyway"])
    assert "cannot be made again" in str(done.exception)
    assert "reward_fn cannot be kept (TypeError: cannot pickle '_thread.lock'" in str(
        done.exception
    )


class RunsCode:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self._marker,)


@pytest.mark.parametrize(
    "value", ["https://example.org/?token=hunter2", "a name \udc80 outside of UTF-8"]
)
def test_values_are_signed_in_their_stored_form(store: Store, value: str) -> None:
    writer = HistoryWriter(store, "2026-01-01")
    inputs = {"config": {"value": value}}
    writer.begin(NewExecution("workflows.sft.sft", "", (), inputs, store.runs / "log"))
    writer.end("succeeded")
    with History(store) as history:
        run = history.execution("2026-01-01")
    assert "hunter2" not in str(run.inputs)
    assert is_signed(store, run)


@pytest.mark.slow
def test_only_records_of_this_user_run_code(
    tiny_model: Path, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, marker = fit(tiny_model).lineage_id, tmp_path / "marker"
    monkeypatch.setattr(reproduction, "run_in", lambda *_args, **_options: 1)
    with History(store) as history:
        (run,) = history.executions().items
    assert is_signed(store, run)
    assert key_file().stat().st_mode & 0o777 == 0o600

    def refusal(*options: str) -> str:
        done = CliRunner().invoke(reproduce, [artifact, "--anyway", *options])
        return str(done.exception)

    assert "has no record of any run" in refusal()  # the second run, which `run_in` skipped
    # Someone else's pickle in a record of this user.
    (store.runs / run.id / "reward_fn.pickle").write_bytes(pickle.dumps(RunsCode(marker)))
    assert "is not the file that the run wrote" in refusal()
    # A record that names another module, and one signed by another user.
    unsigned = f"no run of this user has written the record of {run.id}"
    inputs = json.dumps({**run.inputs, "trainer": "evil:Trainer"})
    with sqlite3.connect(store.root / "history.db") as database:
        database.execute("UPDATE executions SET inputs = ?", [inputs])
    assert unsigned in refusal()
    with sqlite3.connect(store.root / "history.db") as database:
        database.execute("UPDATE executions SET inputs = ?", [json.dumps(run.inputs)])
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another user"))
    assert unsigned in refusal()
    assert "pass --trust" in refusal()
    assert "has no record of any run" in refusal("--trust")
    assert not marker.exists()


SCRIPT = """
import sys
from tests.training import AddTrainer
factor = 3.0
rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
reward = lambda prompt, completion: factor * float(completion)
result = AddTrainer.from_pretrained(sys.argv[1]).fit(rows, reward_fn=reward)
print(result.lineage_id)
"""


@pytest.mark.slow
def test_a_training_of_a_script_is_reproduced_bitwise_identically(
    tiny_model: Path, tmp_path: Path, store: Store
) -> None:
    """Its reward is a lambda over a value, which is in no module."""
    (tmp_path / "mine.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "mine.py", str(tiny_model)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    artifact = done.stdout.strip()
    again = tmp_path / "again"
    repeated = CliRunner().invoke(reproduce, [artifact, "--store", str(again)])
    assert repeated.exit_code == 0, (repeated.output, repeated.exception)
    assert f"bitwise identical: {artifact}" in repeated.output
    with History(Store(again)) as history:
        (run,) = history.executions().items
        assert [node.name for node in history.nodes(run.id)] == ["add"]
