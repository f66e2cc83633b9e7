"""Writing and reading of records of runs."""

import json
import math
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_core.errors import StoreError
from nemo_rl_core.history.inserts import as_value
from nemo_rl_core.history.migrations import SCRIPTS, VERSION
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.writer import HistoryWriter, NodeEnd
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.run_log import RunLog

Begin = Callable[..., HistoryWriter]
MakeArtifact = Callable[..., tuple[Path, Manifest]]


def test_a_run_is_read_as_it_was_written(
    store: Store, begin: Begin, make_artifact: MakeArtifact
) -> None:
    data = make_artifact("prepare_data train", "ab")
    trained = make_artifact("train_sft", "cd", data)
    writer = begin("run1", git_commit="c0ffee", git_dirty=True)
    rows = writer.begin_node("prepare_data", task="tasks.prepare_data.prepare_data", kind="task")
    writer.end_node(
        rows,
        NodeEnd("succeeded", outputs=[as_value("train", "Dataset", {}, data[0].name)], made=[data]),
    )
    warm = writer.begin_node("warm_start", task="workflows.common.warm_start", kind="dynamic")
    taken = [as_value("train", "Dataset", {"step": 0}, data[0].name), as_value("seed", "int", 3)]
    sft = writer.begin_node(
        "train_sft",
        task="tasks.train_sft.train_sft",
        kind="task",
        parent=warm,
        inputs=taken,
        log_from=10,
    )
    writer.connect(rows, "train", sft, "train")
    writer.log_metrics(sft, 1, {"loss": 2.0, "gap": math.nan})
    writer.log_metrics(sft, 2, {"loss": 1.5})
    writer.log_metrics(sft, 2, {"loss": 1.0})  # the step was repeated
    end = NodeEnd(
        "succeeded",
        outputs=[as_value("o0", "Checkpoint", {}, trained[0].name)],
        made=[trained],
        cost={"tokens": 10},
        summary="loss 2 → 1",
        log_to=90,
    )
    writer.end_node(sft, end)
    writer.end_node(warm, NodeEnd("succeeded", made=[trained]))

    with History(store) as history:
        running = history.execution("run1")
        assert (running.state, running.ended_at) == ("running", None)
        writer.end("succeeded")
        done = history.execution("run1")
        assert done.state == "succeeded"
        assert done.ended_at is not None and done.ended_at >= done.started_at
        assert done.inputs == {"config": {"seed": 3}} and done.command == ["pyflyte", "run"]
        assert (done.git_commit, done.git_dirty) == ("c0ffee", True)
        assert (done.num_nodes, done.num_cached) == (2, 0)
        assert [node.name for node in history.nodes("run1")] == [
            "prepare_data",
            "warm_start",
            "train_sft",
        ]
        assert rows and warm and sft
        detail = history.node(sft)
        assert detail.node.parent == warm and detail.node.cost == {"tokens": 10}
        assert (detail.node.log_from, detail.node.log_to) == (10, 90)
        assert [(a.number, a.state) for a in detail.attempts] == [(1, "succeeded")]
        assert [(v.name, json.loads(v.value), v.artifact) for v in detail.inputs] == [
            ("train", {"step": 0}, data[0].name),
            ("seed", 3, None),
        ]
        (edge,) = history.edges("run1")
        assert (edge.source, edge.source_output, edge.target_input) == (rows, "train", "train")
        curves = history.metrics(sft)
        assert curves["loss"] == [(1, 2.0), (2, 1.0)]
        assert math.isnan(curves["gap"][0][1])
        assert history.metrics(sft, names=["loss"], since_step=1) == {"loss": [(2, 1.0)]}
        assert history.metric_names(sft) == ["gap", "loss"]
        artifact = history.artifact(trained[0].name)
        # The dynamic workflow that returned it did not make it.
        assert artifact.made_by == sft and artifact.step == 4
        maker = history.maker(artifact)
        assert maker is not None and maker.id == "run1"
        assert history.artifacts_used("run1") == {data[0].name, trained[0].name}


def test_a_cache_hit_names_the_run_that_made_it(
    store: Store, begin: Begin, make_artifact: MakeArtifact
) -> None:
    made = make_artifact("train_sft", "cd")
    output = [as_value("o0", "Checkpoint", {}, made[0].name)]
    nodes = []
    for execution, state in (("run1", "succeeded"), ("run2", "cached"), ("run3", "cached")):
        writer = begin(execution)
        node = writer.begin_node("train_sft", task="tasks.train_sft.train_sft", kind="task")
        if state == "succeeded":
            writer.log_metrics(node, 1, {"loss": 2.0})
        writer.end_node(node, NodeEnd(state, outputs=output, made=[made]))
        writer.end("succeeded")
        nodes.append(node)
    with History(store) as history:
        hit = history.node(nodes[2])
        assert hit.node.cached_from == nodes[0]
        assert hit.maker is not None and hit.maker.execution == "run1"
        assert history.metrics(nodes[2]) == {"loss": [(1, 2.0)]}
        assert history.execution("run3").num_cached == 1


def test_a_task_is_not_the_maker_of_an_artifact_that_it_returns(
    store: Store, begin: Begin, make_artifact: MakeArtifact
) -> None:
    older = make_artifact("train_sft", "cd")
    writer = begin("run1")
    node = writer.begin_node("promote", task="tasks.promote.promote", kind="task")
    writer.end_node(node, NodeEnd("succeeded", made=[older]))
    writer.end("succeeded")
    with History(store) as history:
        assert history.artifact(older[0].name).made_by is None


def test_an_attempt_records_where_it_resumed(store: Store, begin: Begin) -> None:
    writer = begin("run1")
    node = writer.begin_node("grpo_iteration 1", task="t.grpo_iteration", kind="task")
    writer.resumed(node, 4)
    writer.end_node(node, NodeEnd("succeeded"))
    writer.end("succeeded")
    assert node
    with History(store) as history:
        (attempt,) = history.node(node).attempts
    assert (attempt.number, attempt.state, attempt.resumed_from_step) == (1, "succeeded", 4)


def test_lists_are_filtered_and_paged(store: Store, begin: Begin) -> None:
    for number in range(7):
        workflow = "workflows.sft.sft" if number % 2 else "workflows.grpo.grpo"
        inputs = {"config": {"note": f"100%_{number}"}}
        writer = begin(f"run{number}", workflow=workflow, inputs=inputs)
        writer.end("failed" if number == 3 else "succeeded", "no space" if number == 3 else "")
    with History(store) as history:
        page = history.executions(limit=2, offset=1)
        assert [each.id for each in page.items] == ["run5", "run4"]
        assert (page.total, page.offset, page.limit) == (7, 1, 2)
        assert history.executions(state="failed").items[0].error == "no space"
        assert history.executions(workflow="sft").total == 3
        assert history.executions(workflow="ft").total == 0
        assert history.executions(text="0%_4").total == 1  # these characters are literal
        assert history.executions(text="no SPACE").total == 1
        later = page.items[0].started_at
        assert history.executions(since=later).total == 2
        assert history.workflows() == ["workflows.grpo.grpo", "workflows.sft.sft"]


def test_ancestry_crosses_runs_and_marks_missing_artifacts(
    store: Store, begin: Begin, make_artifact: MakeArtifact
) -> None:
    data = make_artifact("prepare_data", "aa")
    first = make_artifact("train_sft", "bb", data)
    second = make_artifact("grpo_iteration 1", "cc", first, data)
    for execution, made, task in (("run1", first, "train_sft"), ("run2", second, "grpo_iteration")):
        writer = begin(execution)
        inputs = [as_value("start", "Checkpoint", {}, first[0].name)]
        node = writer.begin_node(task, task=f"tasks.{task}", kind="task", inputs=inputs)
        writer.end_node(node, NodeEnd("succeeded", made=[made]))
        writer.end("succeeded")
    (first[0] / "manifest.json").unlink()
    with History(store) as history:
        graph = history.ancestry(second[0].name)
        by_id = {each.id: each for each in graph.artifacts}
        assert [each.depth for each in graph.artifacts] == [0, 1, 1]
        assert by_id[second[0].name].execution == "run2"
        assert by_id[first[0].name].execution == "run1"
        assert by_id[first[0].name].state == "missing"
        # Older than the database: only on disk.
        assert by_id[data[0].name].artifact is not None
        assert by_id[data[0].name].execution is None
        roles = {(each.parent, each.child): each.role for each in graph.parentage}
        assert roles[first[0].name, second[0].name] == "start"
        assert (data[0].name, first[0].name) in roles
        down = history.descendants(first[0].name)
        assert [each.id for each in down.artifacts] == [first[0].name, second[0].name]


def test_artifacts_are_found_by_id_path_and_prefix(
    store: Store, begin: Begin, make_artifact: MakeArtifact
) -> None:
    one, two = make_artifact("train_sft", "ab"), make_artifact("train_sft", "ac")
    writer = begin("run1")
    node = writer.begin_node("train_sft", task="tasks.train_sft", kind="task")
    writer.end_node(node, NodeEnd("succeeded", made=[one, two]))
    writer.end("succeeded")
    older = make_artifact("export", "ee")
    with History(store) as history:
        name = one[0].name
        for word in (name, name[:-10], str(one[0]), str(one[0] / "model"), "abab"):
            assert history.find_artifact(word).id == name
        assert history.find_artifact(str(older[0])).id == older[0].name
        with pytest.raises(StoreError, match="several"):
            history.find_artifact("train_sft-a")
        for word in ("train_sft-x", "*", ""):
            with pytest.raises(StoreError):
                history.find_artifact(word)


def test_a_killed_run_is_marked_when_the_record_is_opened_next(store: Store, begin: Begin) -> None:
    code = """
import os, sys
from pathlib import Path
from nemo_rl_core.history.writer import HistoryWriter, NewExecution
from nemo_rl_core.store.store import Store
writer = HistoryWriter(Store(Path(sys.argv[1])), "killed")
writer.begin(NewExecution("w.w", "", [], {}, Path("run.log")))
node = writer.begin_node("train_sft", task="tasks.train_sft", kind="task")
writer.log_metrics(node, 900, {"loss": 1.0})  # a step
writer.log_metrics(node, 30, {"machine/cpu": 0.5})  # seconds since the run's start
if os.fork() == 0:  # a worker that outlives the run does not count as it
    sys.stdin.read()
    os._exit(0)
print("running", flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(store.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    with History(store) as history:
        assert history.execution("killed").state == "running"
        process.kill()
        process.wait()
        history.sweep()
        assert history.execution("killed").state == "aborted"
        (node,) = history.nodes("killed")
        assert node.state == "aborted"
        killed = history.execution("killed")
        assert node.ended_at == killed.ended_at == killed.started_at + 30
        assert history.node(node.id).attempts[0].state == "aborted"
    process.communicate()


def test_writers_at_once_lose_nothing(store: Store) -> None:
    code = """
import sys
from pathlib import Path
from nemo_rl_core.history.writer import HistoryWriter, NewExecution, NodeEnd
from nemo_rl_core.store.store import Store
writer = HistoryWriter(Store(Path(sys.argv[1])), sys.argv[2])
writer.begin(NewExecution("w.w", "", [], {}, Path("run.log")))
before = None
for number in range(50):
    node = writer.begin_node(f"n {number}", task="t.n", kind="task")
    writer.connect(before, "o0", node, "x")
    writer.log_metrics(node, number, {"loss": 1.0})
    writer.end_node(node, NodeEnd("succeeded"))
    before = node
writer.end("succeeded")
"""
    commands = [[sys.executable, "-c", code, str(store.root), f"run{n}"] for n in range(3)]
    processes = [subprocess.Popen(command) for command in commands]
    assert [process.wait() for process in processes] == [0, 0, 0]
    with History(store) as history:
        for number in range(3):
            nodes = history.nodes(f"run{number}")
            assert len(nodes) == 50 and {node.state for node in nodes} == {"succeeded"}
            assert len(history.edges(f"run{number}")) == 49
            assert all(history.metrics(node.id) for node in nodes)
            assert history.execution(f"run{number}").state == "succeeded"


def test_metrics_may_come_from_another_thread(store: Store, begin: Begin) -> None:
    writer = begin("run1")
    node = writer.begin_node("train_sft", task="t.train_sft", kind="task")
    thread = threading.Thread(target=lambda: writer.log_metrics(node, 1, {"loss": 1.0}))
    thread.start()
    thread.join()
    writer.end("succeeded")
    assert node
    with History(store) as history:
        assert history.metrics(node) == {"loss": [(1, 1.0)]}


def old_file(path: Path, version: int) -> None:
    path.parent.mkdir(parents=True)
    database = sqlite3.connect(path)
    for script in SCRIPTS[:version]:
        database.executescript(script)
    database.execute(
        "INSERT INTO executions (id, workflow, recipe, state, started_at, command, inputs, packages"
        ", machine, source_digest, pid, process_started, log_path) "
        "VALUES ('old', 'w.w', '', 'succeeded', 1.0, '[]', '{}', '{}', '{}', '', 1, 1.0, '')"
    )
    database.execute(
        "INSERT INTO nodes (execution, name, task, kind, state, started_at) "
        "VALUES ('old', 'n', 't.n', 'task', 'succeeded', 1.0)"
    )
    database.executemany(
        "INSERT INTO metrics VALUES (1, ?, ?, ?)",
        [(step, name, 0.5 * step) for step in (1, 2) for name in ("loss", "reward")],
    )
    database.execute(f"PRAGMA user_version = {version}")
    database.commit()
    database.close()


@pytest.mark.parametrize("version", range(1, VERSION))
def test_older_files_are_brought_up_to_date(store: Store, begin: Begin, version: int) -> None:
    old_file(store.root / "history.db", version)
    with History(store) as history:
        (node,) = history.nodes("old")
        assert node.log_from is None
        assert node.point == {}
    writer = begin("new")
    added = writer.begin_node("p", task="t.p", kind="task", point={"seed": 1})
    writer.log_metrics(added, 1, {"reward": 9.0})
    writer.end("succeeded")
    with History(store) as history:
        assert [each.id for each in history.executions().items] == ["new", "old"]
        assert history.metrics(node.id) == {
            "loss": [(1, 0.5), (2, 1.0)],
            "reward": [(1, 0.5), (2, 1.0)],
        }
        assert [each.point for each in history.nodes("new")] == [{"seed": 1}]


def test_a_newer_file_is_refused_and_not_changed(
    store: Store, begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    old_file(store.root / "history.db", VERSION)
    database = sqlite3.connect(store.root / "history.db")
    database.execute(f"PRAGMA user_version = {VERSION + 1}")
    database.close()
    with pytest.raises(StoreError, match="newer version"):
        History(store)
    writer = begin("run1")
    assert writer.begin_node("n", task="t.n", kind="task") is None
    writer.end("succeeded")
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        f"recording of this run in {store.root / 'history.db'} stopped, the run continues"
    ]


def test_a_damaged_file_stops_no_run_and_is_explained(
    store: Store, begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    store.root.mkdir()
    (store.root / "history.db").write_bytes(b"not a database" * 1000)
    writer = begin("run1")
    node = writer.begin_node("n", task="t.n", kind="task")
    writer.log_metrics(node, 1, {"loss": 1.0})
    writer.end_node(node, NodeEnd("succeeded"))
    writer.end("succeeded")
    assert len(caplog.records) == 1
    with pytest.raises(StoreError, match="move it away"):
        History(store)


def test_a_file_that_breaks_during_a_run_does_not_stop_it(
    store: Store, begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    writer = begin("run1")
    other = sqlite3.connect(store.root / "history.db")
    other.execute("DROP TABLE metrics")
    other.close()
    node = writer.begin_node("n", task="t.n", kind="task")
    for step in range(3):
        writer.log_metrics(node, step, {"loss": 1.0})
    writer.end("succeeded")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with History(store) as history:
        assert history.execution("run1").state == "succeeded"  # its end is still recorded


def test_an_empty_store_names_the_fix(store: Store) -> None:
    with pytest.raises(StoreError, match="run a workflow first"):
        History(store)


def test_a_store_that_cannot_be_written_can_be_read(store: Store, begin: Begin) -> None:
    """Runs as another user, since root may write everything."""
    begin("run1").end("succeeded")
    code = """
import os, sys
from pathlib import Path
from nemo_rl_core.history.queries import History
from nemo_rl_core.store.store import Store
if os.getuid() == 0:
    os.setuid(65534)
with History(Store(Path(sys.argv[1]))) as history:
    print(history.executions().items[0].id)
"""
    for folder in (store.root, *store.root.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(0o555 if folder == store.root else folder.stat().st_mode | 0o055)
        if folder.name.startswith("pytest-of"):
            break
    (store.root / "history.db").chmod(0o444)
    done = subprocess.run(
        [sys.executable, "-c", code, str(store.root)], capture_output=True, text=True, check=False
    )
    store.root.chmod(0o755)
    assert done.stdout.strip() == "run1", done.stderr


def test_long_values_are_cut_and_odd_ones_written(store: Store, begin: Begin) -> None:
    long = as_value("x", "str", "é" * 100_000)
    assert json.loads(long.value).endswith("… (cut)")
    assert len(long.value) <= 64 * 1024
    writer = begin("run1")
    odd = as_value("x", "str", "a\ud800b\x00")
    node = writer.begin_node(
        "n", task="t.n", kind="task", inputs=[odd, as_value("y", "Path", Path("p"))]
    )
    writer.end("succeeded")
    assert node
    with History(store) as history:
        values = [json.loads(value.value) for value in history.node(node).inputs]
    assert values == ["a\ud800b\x00", "p"]


def test_values_that_sqlite_cannot_store_do_not_end_a_run(store: Store, begin: Begin) -> None:
    """Half a surrogate pair, such as in a quoted error, and a number of more than 64 bits."""
    half = "half \ud800 a pair"
    writer = begin("odd", workflow=half, command=[half])
    node = writer.begin_node(half, task=half, kind="task", inputs=[as_value(half, half, half)])
    writer.log_metrics(node, 1, {half: 1.0})
    writer.end_node(node, NodeEnd("failed", error=half, summary=half))
    other = writer.begin_node("more", task="t", kind="task")
    writer.log_metrics(other, 2**70, {"loss": 1.0})
    writer.end("failed", half)
    with History(store) as history:
        run = history.execution("odd")
        assert (run.state, run.error) == ("failed", "half \\ud800 a pair")
        assert history.nodes("odd")[0].error == run.error
        assert history.metric_names(node) == [run.error]


def test_names_of_runs_are_ids(store: Store, begin: Begin) -> None:
    with RunLog.start(store) as log:
        begin(log.folder.name).end("succeeded")
        with History(store) as history:
            assert history.execution(log.folder.name).id == log.folder.name
