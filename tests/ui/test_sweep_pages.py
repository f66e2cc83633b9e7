"""The pages of a sweep: one line per point, and evaluations compared by point."""

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from nemo_rl_core.evals.rows import save_eval_rows
from nemo_rl_core.history.inserts import as_value
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import point_label
from nemo_rl_core.history.writer import HistoryWriter, NewExecution, NodeEnd
from nemo_rl_core.store.manifest import Cost, Manifest
from nemo_rl_core.store.store import Store
from nemo_rl_core.ui import curves
from nemo_rl_core.ui.app import create_app
from nemo_rl_core.ui.plots import overlay

RUNS = ("20260101T000001Z-aaaaaa", "20260101T000002Z-bbbbbb")
POINTS = [{"seed": seed, "grpo.learning_rate": rate} for seed in (0, 1) for rate in (1e-4, 2e-4)]


def artifact(store: Store, name: str, stage: str, kind: str, *parents: Path) -> Path:
    folder = store.artifacts / name
    folder.mkdir(parents=True)
    Manifest(
        name=name,
        kind=kind,
        format="hf",
        stage=stage,
        content_hash=name,
        step=2,
        parents=tuple(Manifest.read(parent).ref(parent) for parent in parents),
        cost=Cost(wall_seconds=2.0, tokens=10),
    ).write(folder)
    return folder


def record_stage(writer: HistoryWriter, folder: Path, parent: int, point: dict[str, float]) -> int:
    stage = Manifest.read(folder).stage
    name = stage.partition(" ")[0]
    node = writer.begin_node(
        stage, task=f"tasks.{name}.{name}", kind="task", parent=parent, point=point
    )
    assert node is not None
    output = as_value("o0", "Artifact", "", folder.name)
    manifest = Manifest.read(folder)
    end = NodeEnd(
        "succeeded", outputs=[output], made=[(folder, manifest)], cost=manifest.cost.model_dump()
    )
    writer.end_node(node, end)
    return node


def record_sweep(store: Store, execution: str) -> None:
    """Records four points with one iteration and one evaluation each; later points solve more."""
    writer = HistoryWriter(store, execution)
    log = store.runs / execution / "run.log"
    log.parent.mkdir(parents=True)
    log.write_text("")
    writer.begin(NewExecution("workflows.sweep.sweep", "", [], {}, log))
    mapped = writer.begin_node("sweep_point", task="tasks.sweep_point.map", kind="task")
    for number, point in enumerate(POINTS):
        name = f"sweep_point ({point_label(point)})"
        parent = writer.begin_node(
            name, task="tasks.sweep_point.sweep_point", kind="task", parent=mapped, point=point
        )
        assert parent is not None
        model = artifact(
            store, f"grpo_iteration-{execution}-{number}", "grpo_iteration 1", "checkpoint"
        )
        node = record_stage(writer, model, parent, point)
        for step in (1, 2):
            writer.log_metrics(node, step, {"reward": float(number * step), "global_step": step})
        report = artifact(store, f"evaluate-{execution}-{number}", "evaluate", "evaluation", model)
        rows = [
            {
                "prompt_id": str(n),
                "mode": "greedy",
                "sample": 0,
                "category": "",
                "prompt": "1+1=",
                "completion": "2",
                "answer": "2",
                "extracted": "2",
                "reward": 1.0,
                "correct": n < 4 * (number + 1),
                "truncated": False,
                "error": None,
            }
            for n in range(20)
        ]
        save_eval_rows(rows, report / "rows.parquet")
        record_stage(writer, report, parent, point)
        writer.end_node(parent, NodeEnd("succeeded"))
    writer.end_node(mapped, NodeEnd("succeeded"))
    writer.end("succeeded")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    store = Store(tmp_path_factory.mktemp("sweeps") / "store")
    for execution in RUNS:
        record_sweep(store, execution)
    return TestClient(create_app(store), base_url="http://127.0.0.1:8321")


def test_every_point_is_a_line_with_its_name(client: TestClient) -> None:
    page = client.get(f"/executions/{RUNS[0]}/curves").text
    legend = page.partition('<ul class="legend">')[2].partition("</ul>")[0]
    names = [part.partition("</li>")[0] for part in legend.split("</svg>")[1:]]
    assert names == [point_label(point) for point in POINTS]
    reward = page.partition("<span>reward</span>")[2].partition("</figure>")[0]
    for number, point in enumerate(POINTS):
        line = f"<title>{point_label(point)}: last {2 * number}</title>"
        assert f'{line}<polyline class="curve s{number}"' in reward
    assert reward.count("<polyline") == 4
    for point in POINTS:
        assert f">grpo_iteration 1 ({point_label(point)})</a>" in page


def test_evaluations_are_compared_with_those_of_the_same_point(client: TestClient) -> None:
    page = client.get(f"/compare?run={RUNS[0]}&run={RUNS[1]}").text
    for number, point in enumerate(POINTS):
        name = f"<h3>evaluate of grpo_iteration ({point_label(point)})</h3>"
        card = page.partition(name)[2].partition("</div>")[0]
        share = 20 * (number + 1)
        assert card.count(f"{share}.0 % right") == 2
    chart = page.partition("<figcaption><span>grpo_iteration: reward<")[2].partition("</figure>")[0]
    assert [chart.count(f'"curve s{color}') for color in range(4)] == [2, 2, 2, 2]


def test_points_are_compared_by_tests_and_seeds_are_a_band(client: TestClient) -> None:
    page = client.get(f"/compare?run={RUNS[0]}").text
    labels = [point_label(point) for point in POINTS]
    # 4, 8, 12 and 16 of 20 prompts are right; three verdicts at 1 - 0.05 / 3.
    assert "No difference shown at 98.3 % confidence: +20.0 points" in page
    for label in labels[2:]:
        assert f"{label[0].upper()}{label[1:]} is better than {labels[0]} at 98.3 %" in page
    figure = page.partition("Parallel coordinates")[2].partition("</figure>")[0]
    assert figure.count("<polyline") == 4
    first_prompt = page.partition('<article class="reading">')[2].partition("</article>")[0]
    assert first_prompt.count("wrong</span>") + first_prompt.count("right</span>") == 4
    assert "wrong</span>" in first_prompt

    folded = client.get(f"/compare?run={RUNS[0]}&fold=seed").text
    chart = folded.partition("<figcaption><span>grpo_iteration: reward<")[2].partition("</figure>")[
        0
    ]
    assert (chart.count("<polyline"), chart.count("<polygon")) == (2, 2)
    # Rewards of step 2 are 0 and 4 at the first rate, 2 and 6 at the second.
    assert "sweep learning_rate 0.0001, 2 seeds: last 2<" in chart
    assert "sweep learning_rate 0.0002, 2 seeds: last 4<" in chart


def test_a_band_interpolates_curves_that_are_thinned_at_other_steps() -> None:
    plot = overlay("reward", [("seeds", 0, [[(1, 0.0), (3, 2.0)], [(1, 2.0), (2, 4.0), (4, 8.0)]])])
    # At the steps 1, 2 and 3 the means are 1, 2.5 and 4, from 0 to 2, 1 to 4 and 2 to 6; at step 4
    # there is only the second curve. A value of 8 is at the top (14), 0 at the bottom (172).
    (line,) = plot.lines
    assert line.strokes == ["60.0,152.2 176.7,122.6 293.3,93.0 410.0,14.0"]
    highs, lows = "60.0,132.5 176.7,93.0 293.3,53.5 410.0,14.0", "410.0,14.0 293.3,132.5"
    assert line.band == f"{highs} {lows} 176.7,152.2 60.0,172.0"
    assert (line.last, line.label) == ("8", "seeds, 2 seeds, 1 at the last step")
    assert [text for _, text in plot.ticks_y] == ["0", "2", "4", "6", "8"]


def test_long_curves_that_are_compared_keep_their_peaks() -> None:
    """A stride over the 1000 steps would miss step 501; so would a mean of the two seeds."""
    peak = [(float(n), 10.0 if n == 501 else 0.0) for n in range(1001)]
    flat = [(x, 5.0) for x, _ in peak]
    one, band = overlay("reward", [("one", 0, [peak]), ("seeds", 1, [peak, flat])]).lines
    x = 60 + 350 * 0.501
    assert f"{x:.1f},14.0" in one.strokes[0].split()
    assert len(one.strokes[0].split()) < 400
    assert f"{x:.1f},14.0" in band.band.split()
    # Half of 10 and 5 is at a height of 7.5 of 10.
    assert f"{x:.1f},53.5" in band.strokes[0].split()


def test_a_point_has_the_cost_of_its_stages(client: TestClient) -> None:
    page = client.get(f"/executions/{RUNS[0]}/nodes").text
    link = page.partition(f">sweep_point ({point_label(POINTS[1])})</a>")[0].rpartition('href="')[2]
    cost = client.get(link.partition('"')[0]).text.partition("<dt>Cost</dt>")[2]
    assert "4.0 s of work" in cost.partition("</dd>")[0]
    assert "20 tokens" in cost.partition("</dd>")[0]


def test_the_completions_of_a_point_name_their_run(client: TestClient) -> None:
    page = client.get(f"/artifacts/evaluate-{RUNS[0]}-2").text
    assert f'href="/executions/{RUNS[0]}"' in page


def test_an_alarm_of_one_point_among_many_is_found(tmp_path: Path) -> None:
    """Curves of so many points are thinned to few buckets, which hide three steps in a row."""
    store = Store(tmp_path / "store")
    writer = HistoryWriter(store, RUNS[0])
    writer.begin(NewExecution("workflows.sweep.sweep", "", [], {}, store.runs / "log"))
    rows = []
    for number in range(150):
        node = writer.begin_node("g", task="t.g", kind="task", parent=None, point={"seed": number})
        assert node is not None
        bad = {"kl": {20, 21, 22}, "grad_norm": {30}}
        rows += [
            (node, step, name, wrong if number == 77 and step in bad[name] else 0.1)
            for name, wrong in (("kl", 0.6), ("grad_norm", None))
            for step in range(1, 41)
        ]
        writer.end_node(node, NodeEnd("succeeded"))
    with writer._open as database:
        database.execute("BEGIN")
        database.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?)", rows)
    writer.end("succeeded")
    with History(store) as history:
        (stage,) = curves.stages(history, RUNS[0])
        alarms = curves.alarms_of(history, stage)
    assert [(each.label, one.metric, one.since, one.until) for each, one in alarms] == [
        ("seed 77", "grad_norm", 30, 30),
        ("seed 77", "kl", 20, 22),
    ]
