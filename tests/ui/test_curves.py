"""Curves as JSON and CSV, the present state of a run, and the stream of events."""

import importlib.util
import math
import socket
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from starlette.testclient import TestClient

from nemo_rl_core.history.queries import History
from nemo_rl_core.history.writer import HistoryWriter, NewExecution, NodeEnd
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.store import Store
from nemo_rl_core.types import Completion, Prompt, Rollout, StepReport
from nemo_rl_core.ui import live, machine_load
from nemo_rl_core.ui.app import create_app
from nemo_rl_core.ui.charts import ticks
from nemo_rl_core.ui.curves import ordered
from nemo_rl_core.ui.live import run_status
from nemo_rl_core.ui.pages import events

FIRST = "20260101T000000Z-aaaaaa"


def begin(store: Store, name: str) -> HistoryWriter:
    writer = HistoryWriter(store, name)
    log = store.runs / name / "run.log"
    writer.begin(NewExecution("workflows.grpo.grpo", "demo", ["nemo-rl"], {}, log))
    return writer


@pytest.fixture
def training(tmp_path: Path) -> Iterator[tuple[Store, HistoryWriter, int]]:
    """A running run after 6 of 10 steps, one per 2 seconds, in its second iteration."""
    store = Store(tmp_path / "store")
    before = begin(store, "before")
    for name in ("plan", "data", "train", "evaluate"):
        before.end_node(
            before.begin_node(name, task=f"t.{name}", kind="task"), NodeEnd("succeeded")
        )
    before.end("succeeded")
    writer = begin(store, "run")
    began = writer._began
    for first in (1, 4):
        node = writer.begin_node(f"train {first // 4 + 1}", task="t.train", kind="task")
        for step in range(first, first + 3):
            writer._began = began - 2.0 * step
            values = {"reward": 0.1 * step, "kl": 1.0, "num_valid_tokens": 10.0}
            values |= {"validation_reward": 0.5} if step == 4 else {}
            steps = StepReport(
                "train",
                step - first + 1,
                7,
                {"global_step": float(step), **values},
                {"tokens_per_second": 50.0},
            )
            writer.log_step(node, steps)
        if first == 1:
            writer.end_node(node, NodeEnd("succeeded"))
    yield store, writer, node
    writer.end("succeeded")


def client_of(store: Store) -> TestClient:
    return TestClient(create_app(store), base_url="http://localhost")


def chart(data: dict, name: str) -> dict:
    (found,) = (c for stage in data["stages"] for c in stage["charts"] if c["name"] == name)
    return found


def test_json_has_the_lines_of_every_iteration(client: TestClient) -> None:
    data = client.get(f"/executions/{FIRST}/curves.json").json()
    (line,) = chart(data, "reward")["lines"]
    assert line["x"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert line["y"] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.2, 0.4, 0.6, 0.8])
    assert chart(data, "loss")["lines"][0]["y"][1] is None
    assert data["stages"][0]["borders"] == [{"x": 5, "label": "grpo_iteration 2"}]


def test_json_follows_the_choice(training) -> None:
    client = client_of(training[0])

    def read(query: str) -> dict:
        return client.get(f"/executions/run/curves.json?{query}").json()

    assert [c["name"] for c in read("")["stages"][0]["charts"]] == ["reward"]
    assert [c["name"] for c in read("show=kl")["stages"][0]["charts"]] == ["kl"]
    assert chart(read(""), "reward")["validation"][0]["x"] == [4]
    assert chart(read("from=2&to=4"), "reward")["lines"][0]["x"] == [2, 3, 4]
    seconds = chart(read("x=time"), "reward")["lines"][0]["x"]
    assert seconds == pytest.approx([2, 4, 6, 8, 10, 12], abs=1.0)
    tokens = read("x=tokens")
    assert chart(tokens, "reward")["lines"][0]["x"] == [10, 20, 30, 40, 50, 60]
    assert tokens["stages"][0]["borders"][0]["x"] == 40
    assert tokens["stages"][0]["label"] == "tokens trained on"
    (mark,) = chart(read("show=kl"), "kl")["alarms"]
    assert (mark["name"], mark["from"], mark["isOver"]) == ("KL to the reference", 1, False)


def log_train(writer: HistoryWriter, node: int, steps: range, seconds: float) -> None:
    """Logs a step per second of the run, after some seconds of it."""
    for step in steps:
        writer._began = time.time() - seconds - (step - steps.start + 1)
        report = StepReport("train", step, steps[-1], {"global_step": step, "reward": 0.1 * step})
        writer.log_step(node, report)


@pytest.fixture
def cached(tmp_path: Path) -> TestClient:
    """A run whose first iteration is cached, and whose other stage has no times."""
    store = Store(tmp_path / "store")
    maker, writer = begin(store, "maker"), begin(store, "run")
    node = maker.begin_node("train 1", task="t.train", kind="task")
    log_train(maker, node, range(1, 4), 0)
    maker.end_node(node, NodeEnd("succeeded"))
    hit = writer.begin_node("train 1", task="t.train", kind="task")
    writer.end_node(hit, NodeEnd("cached"))
    with writer._database as database:
        database.execute("UPDATE nodes SET cached_from = ? WHERE id = ?", (node, hit))
    log_train(writer, writer.begin_node("train 2", task="t.train", kind="task"), range(4, 7), 0)
    other = writer.begin_node("score", task="t.score", kind="task")
    for step in range(1, 301):
        writer.log_metrics(other, step, {"accuracy": step / 300})
    maker.end("succeeded")
    writer.end("succeeded")
    return client_of(store)


def test_cached_stages_have_steps_and_tokens_but_no_seconds_of_the_run(cached: TestClient) -> None:
    data = cached.get("/executions/run/curves.json").json()
    assert chart(data, "reward")["lines"][0]["x"] == [1, 2, 3, 4, 5, 6]
    data = cached.get("/executions/run/curves.json?x=time").json()
    (line,) = chart(data, "reward")["lines"]
    assert line["x"] == pytest.approx([1, 2, 3], abs=0.5)
    assert line["y"] == pytest.approx([0.4, 0.5, 0.6])
    assert data["stages"][0]["borders"] == []
    page = cached.get("/executions/run/curves?x=time").text
    assert "reward over seconds of the run, without cached stages 1" in page


def test_a_stage_without_times_has_its_steps(cached: TestClient) -> None:
    data = cached.get("/executions/run/curves.json?x=time&from=10&to=12").json()
    assert [stage["axis"] for stage in data["stages"]] == ["time", "step"]
    assert chart(data, "accuracy")["lines"][0]["x"] == [10, 11, 12]
    assert len(chart(data, "reward")["lines"][0]["x"]) == 3  # a part is of steps, not of seconds


def test_lines_keep_color_and_label_in_a_part_that_others_do_not_reach(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    writer = begin(store, "run")
    for point, steps in ({"seed": 0}, 5), ({"seed": 1}, 20):
        node = writer.begin_node("train", task="t.train", kind="task", point=point)
        for step in range(1, steps + 1):
            writer.log_metrics(node, step, {"reward": float(step)})
        writer.end_node(node, NodeEnd("succeeded"))
    writer.end("succeeded")
    data = client_of(store).get("/executions/run/curves.json?from=10&to=12").json()
    (line,) = chart(data, "reward")["lines"]
    assert (line["label"], line["color"], line["x"]) == ("seed 1", 1, [10, 11, 12])


def test_many_lines_are_thinned_more_and_alarms_are_not(tmp_path: Path) -> None:
    """64 points of a sweep have at most 32 buckets each: 150 steps are 19 of 8 steps."""
    store = Store(tmp_path / "store")
    writer = begin(store, "run")
    nodes = [
        writer.begin_node("train", task="t.train", kind="task", point={"seed": seed})
        for seed in range(64)
    ]
    with writer._database as database:
        database.executemany(
            "INSERT INTO metrics VALUES (?, ?, 'kl', ?)",
            # Three steps above 0.5, inside of a bucket; else 0.1 and 0.2 in turn.
            [
                (n, s, 0.9 if 100 <= s < 103 else 0.1 + 0.1 * (s % 2))
                for n in nodes
                for s in range(150)
            ],
        )
    for node in nodes:
        writer.end_node(node, NodeEnd("succeeded"))
    client = client_of(store)
    data = client.get("/executions/run/curves.json").json()
    lines = chart(data, "kl")["lines"]
    assert [len(line["x"]) for line in lines] == [38] * 64
    assert {max(line["y"]) for line in lines} == {0.9}
    marks = [(each["from"], each["to"], each["isOver"]) for each in chart(data, "kl")["alarms"]]
    assert marks == [(100, 102, True)] * 64
    part = client.get("/executions/run/curves.json?from=96&to=111").json()
    assert chart(part, "kl")["lines"][0]["x"] == list(range(96, 112))
    writer.end("succeeded")


def test_the_machine_is_thinned_but_keeps_its_peak(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    writer = begin(store, "run")
    node = writer.begin_node("train", task="t.train", kind="task")
    with writer._database as database:
        rows = [(node, 10 * n, 97.0 if n == 777 else 5.0 + n % 2) for n in range(6_000)]
        database.executemany("INSERT INTO metrics VALUES (?, ?, 'machine/cpu_percent', ?)", rows)
    writer.end("succeeded")
    with History(store) as history:
        nodes = history.nodes("run")
        (one,) = machine_load.charts(history, nodes, history.metric_names_of("run"))
    (line,) = one.lines
    assert line.count <= 512  # of 6,000
    # 97 is at the top, at 7770 seconds; the last extreme value is at 59,920.
    assert f"{60 + 350 * 7770 / 59_920:.1f},14.0" in line.strokes[0].split()


def test_csv_has_every_value(client: TestClient) -> None:
    answer = client.get(f"/executions/{FIRST}/curves.csv?show=loss")
    lines = answer.text.splitlines()
    assert lines[0] == "stage,node,metric,step,value"
    assert len(lines) == 9
    assert lines[1].startswith("grpo_iteration 1,") and lines[1].endswith(",loss,1,1.0")
    assert lines[2].endswith(",loss,2,nan")
    assert client.get(f"/executions/{FIRST}/curves.csv?show=none").status_code == 404


def test_the_page_without_scripts_has_choice_borders_and_constants(training) -> None:
    page = client_of(training[0]).get("/executions/run/curves?x=tokens&show=reward").text
    assert 'aria-label="reward over tokens trained on 10 to 60: last value 0.6"' in page
    assert page.count('class="border"') == 1
    assert '<input type="checkbox" name="show" value="reward" checked>' in page
    assert "<dt>kl</dt><dd>1</dd>" in page


def test_metrics_are_ordered_by_meaning() -> None:
    names = ["zeta", "timings/train_seconds", "kl", "grad_norm", "reward", "progress/last_step"]
    names += ["machine/cpu_percent", "global_step", "truncated_fraction", "kl_generation_trainer"]
    assert ordered(names) == (
        "reward", "kl", "truncated_fraction", "grad_norm", "timings/train_seconds",
        "kl_generation_trainer", "zeta",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0, 24, ["0", "5", "10", "15", "20"]),
        (1, 2, ["1", "1.2", "1.4", "1.6", "1.8", "2"]),
        (-0.013, 0.02, ["-0.01", "0", "0.01", "0.02"]),
        (5, 5, ["5"]),
        (-1e308, 1e308, ["-1e+308", "1e+308"]),
    ],
)
def test_ticks_are_round(low: float, high: float, texts: list[str]) -> None:
    assert [text for _, text in ticks(low, high, 6 if high != 0.02 else 4)] == texts


def test_the_present_state_of_a_run(training) -> None:
    store, _, node = training
    with History(store) as history:
        state = run_status(history, history.execution("run"))
    assert (state.stage.id, state.number, state.expected) == (node, 2, 4)
    assert (state.step, state.last_step) == (6, 10)
    assert state.figures == {"reward": pytest.approx(0.6), "tokens per second": 50.0}
    assert state.seconds_left == pytest.approx(4 * 2.0, abs=0.5)
    ((stage, alarm),) = state.alarms
    assert (stage, alarm.rule.name, alarm.since, alarm.is_over) == (
        "train", "KL to the reference", 1, False,
    )  # fmt: skip


def test_a_run_without_steps_for_an_hour_has_an_alarm(training, monkeypatch) -> None:
    store = training[0]
    real = time.time
    monkeypatch.setattr(live.time, "time", lambda: real() + 3700)
    with History(store) as history:
        state = run_status(history, history.execution("run"))
    assert [alarm.rule.name for _, alarm in state.alarms] == ["KL to the reference", "No step"]
    page = client_of(store).get("/executions/run").text
    assert "The stage may hang" in page
    assert '<span class="badge">2</span> alarms' in page
    assert '<section class="alarms" ' in page


def test_a_past_alarm_is_listed_but_not_counted(training) -> None:
    store, writer, node = training
    writer.log_metrics(node, 7, {"kl": 0.1, "reward": math.nan})
    page = client_of(store).get("/executions/run").text
    assert '<span class="badge">1</span> alarm<' in page
    assert "<code>kl</code> of train, steps 1 to 6, then right again" in page
    writer.log_metrics(node, 8, {"reward": 0.5})
    page = client_of(store).get("/executions/run").text
    assert '<section class="alarms past" ' in page and "No alarm now; past ones" in page
    assert "badge" not in page
    assert "<dt>Time left in this stage</dt>" in page
    assert "<span>2 stages, 0 from the cache</span>" in page


def stream(address: str) -> socket.socket:
    host, _, port = address.removeprefix("http://").partition(":")
    client = socket.create_connection((host, int(port)), timeout=30)
    client.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return client


def read_until(client: socket.socket, text: bytes) -> bytes:
    answer = b""
    while text not in answer:
        part = client.recv(65536)
        assert part, answer
        answer += part
    return answer


def test_a_change_of_the_record_is_an_event(training, serve) -> None:
    store, writer, node = training
    with serve(store) as address, stream(address) as client:
        head = read_until(client, b"retry: 3000")
        assert head.startswith(b"HTTP/1.1 200 ") and b"text/event-stream" in head
        assert b"content-security-policy" in head
        writer.log_metrics(node, 7, {"reward": 1.0})
        assert b"event: changed\ndata:\n\n" in read_until(client, b"changed\ndata:\n\n")
        began = time.monotonic()
    assert time.monotonic() - began < 10  # an open stream does not delay the end of the server


def test_streams_above_the_limit_are_refused(training, serve, monkeypatch) -> None:
    monkeypatch.setattr(events, "MAX_STREAMS", 1)
    with serve(training[0]) as address:
        with stream(address) as client:
            read_until(client, b"retry")
            with stream(address) as other:
                assert read_until(other, b"open.").startswith(b"HTTP/1.1 503 ")
        deadline = time.monotonic() + 20  # the first one is gone
        while True:
            training[1].log_metrics(training[2], 8, {"reward": time.monotonic()})
            with stream(address) as client:
                if client.recv(65536).startswith(b"HTTP/1.1 200 "):
                    break
            assert time.monotonic() < deadline
            time.sleep(0.2)


def benchmark() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "live_curves.py"
    spec = importlib.util.spec_from_file_location("live_curves", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_refresh_of_50_000_points_reads_only_new_ones(tmp_path: Path) -> None:
    """Against reading every value, as an answer without kept buckets would."""
    module, store = benchmark(), Store(tmp_path)
    with module.running(store) as (writer, node):
        client = client_of(store)
        module.refreshes(client, writer, node, first=module.STEPS + 1, repeats=1)
        times = module.refreshes(client, writer, node, first=module.STEPS + 2, repeats=7)
        with History(store) as history:
            began = time.process_time()
            assert len(history.metrics(node)["reward"]) == module.STEPS + 8
            every_value = 1000 * (time.process_time() - began)
    refresh = statistics.median(cpu for _, cpu in times)
    assert refresh < 100
    assert refresh < every_value / 8


def test_the_strip_of_a_large_group_is_as_wide_as_its_bars(tmp_path: Path) -> None:
    """64 bars of 10 are 640 wide, also for 100 samples."""
    store = Store(tmp_path / "store")
    folder = store.artifacts / "grpo_iteration-0a"
    folder.mkdir(parents=True)
    manifest = Manifest(
        kind="checkpoint", format="hf", stage="grpo_iteration 1", content_hash="0a", step=1
    )
    manifest.write(folder)
    writer = begin(store, "run")
    node = writer.begin_node("grpo_iteration 1", task="t.grpo", kind="task")
    prompt, completion = Prompt("p", "2+2=", (1,), "4", ""), Completion((3,), (-0.1,), False)
    rollouts = [Rollout(prompt, completion, "4", reward=1.0, sample=n) for n in range(100)]
    RolloutRecords(folder / "rollouts").save(1, rollouts)
    writer.end_node(node, NodeEnd("succeeded", made=[(folder, manifest)]))
    writer.end("succeeded")
    page = client_of(store).get(f"/artifacts/{folder.name}/completions").text
    strip = page.partition('<svg class="strip"')[2].partition("</svg>")[0]
    assert 'viewBox="0 0 640 100"' in strip and "Rewards of the first 64 samples: 1, 1," in strip
    assert strip.count('<rect class="track"') == 64
