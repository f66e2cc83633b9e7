"""The table of runs: results from the record, labels, conditions, order and groups."""

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

import nemo_rl_core
from nemo_rl_core.errors import ConfigError, NotRecordedError, StoreError
from nemo_rl_core.history.inserts import as_value
from nemo_rl_core.history.labels import LABELS, Labels, read_labels, set_labels, set_pin
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import point_label
from nemo_rl_core.history.results import RunQuery, run_row, run_rows
from nemo_rl_core.history.run_columns import differing, grouped, record_of, shown_settings
from nemo_rl_core.history.run_results import Accuracy, sparkline
from nemo_rl_core.history.writer import HistoryWriter, NewExecution, NodeEnd
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.store import Store
from nemo_rl_core.types import Completion, Prompt, Rollout
from workflows import cli

FIRST, SECOND, SFT, SWEEP = (f"20260101T00000{n}Z-{c * 6}" for n, c in enumerate("abcd"))
POINTS = [{"seed": seed, "grpo.learning_rate": rate} for seed in (0, 1) for rate in (0.1, 0.2)]


class Recorder:
    """Records runs with stages, metrics and evaluations."""

    def __init__(self, store: Store, run: str, workflow: str, config: dict, command=()) -> None:
        self.store, self.run = store, run
        log = store.runs / run / "run.log"
        log.parent.mkdir(parents=True)
        self.writer = HistoryWriter(store, run)
        self.writer.begin(NewExecution(workflow, "tiny", list(command), {"config": config}, log))

    def stage(self, stage, *, kind="checkpoint", parent=None, point=None, summary="", **rest):
        metrics, figures, state = (rest.get(n) for n in ("metrics", "figures", "state"))
        name = stage.partition(" ")[0]
        node = self.writer.begin_node(
            stage, task=f"tasks.{name}.{name}", kind="task", parent=parent, point=point or {}
        )
        for step, values in (metrics or {}).items():
            self.writer.log_metrics(node, step, values)
        folder = self.store.artifacts / f"{name}-{node:016x}"
        folder.mkdir(parents=True)
        manifest = Manifest(
            kind=kind, format="hf", stage=stage, content_hash=f"{node}", figures=figures or {}
        )
        manifest.write(folder)
        cost = {"tokens": 10, "gpu_seconds": 1800.0, "money": 0.5, "currency": "EUR"}
        self.writer.end_node(
            node,
            NodeEnd(
                state or "succeeded",
                outputs=[as_value("o0", "C", "", folder.name)],
                made=[(folder, manifest)],
                cost={} if state == "cached" else cost,
                summary=summary,
            ),
        )
        return node, folder


def accuracy(value: float) -> dict[str, float]:
    name = "greedy_accuracy"
    return {name: value, f"{name}_low": value - 0.1, f"{name}_high": value + 0.1}


def grpo(store: Store, run: str, rate: float, backend: dict, after: float, verdict: str) -> None:
    grpo_config = {"num_iterations": 2, "num_steps_per_iteration": 12, "learning_rate": rate}
    recorder = Recorder(
        store, run, "workflows.grpo.grpo", {"seed": 0, "grpo": grpo_config, "generation": backend}
    )
    recorder.stage("train_sft", metrics={1: {"loss": 3.0}})
    recorder.stage("evaluate", kind="evaluation", figures=accuracy(0.25))
    recorder.stage("grpo_iteration 1", metrics={n: {"reward": 0.0} for n in range(1, 13)})
    rewards = {n: {"reward": 1.0 if n > 14 else 0.0, "loss": 0.5} for n in range(13, 25)}
    _, folder = recorder.stage("grpo_iteration 2", metrics=rewards)
    prompt = Prompt(id="p", text="2+2=", token_ids=(1,), answer="4", task="")
    completion = Completion((3,), (-0.1,), False)
    RolloutRecords(folder / "rollouts").save(13, [Rollout(prompt, completion, "four", reward=1.0)])
    recorder.stage("evaluate", kind="evaluation", figures=accuracy(after), state="cached")
    recorder.stage("promote", kind="promotion", summary=verdict)
    recorder.writer.end("succeeded")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(tmp_path_factory.mktemp("results") / "store")
    hf = {"backend": "hf", "max_new_tokens": 3}
    vllm = {"backend": "vllm", "max_new_tokens": 3, "kv_cache_gib": 1}
    grpo(store, FIRST, 0.1, hf, 0.75, "promoted: +50.0 points")
    grpo(store, SECOND, 0.2, vllm, 0.5, "NOT promoted: +25.0 points, this may be chance")
    sft = Recorder(
        store,
        SFT,
        "nemo_rl_core.algorithms.sft.trainer.SFTTrainer",
        {"sft": {"num_steps": 4}},
        ["nemo-rl", "run", "sft", "tiny", "sft.num_steps=4"],
    )
    sft.stage("sft", metrics={n: {"loss": 1 / n} for n in (1, 2)})
    sft.writer.end("failed", "out of memory")
    sweep = Recorder(store, SWEEP, "workflows.sweep.sweep", {"base": {"seed": 0}})
    mapped = sweep.writer.begin_node("sweep_point", task="tasks.sweep_point.map", kind="task")
    for number, point in enumerate(POINTS):
        node = sweep.writer.begin_node(
            f"sweep_point ({point_label(point)})",
            task="tasks.sweep_point.sweep_point",
            kind="task",
            parent=mapped,
            point=point,
        )
        options = {"parent": node, "point": point}
        sweep.stage("grpo_iteration 1", metrics={1: {"reward": float(number)}}, **options)
        sweep.stage("evaluate", kind="evaluation", figures=accuracy(0.2 * number), **options)
        sweep.writer.end_node(node, NodeEnd("succeeded"))
    sweep.writer.end_node(mapped, NodeEnd("succeeded"))
    sweep.writer.end("succeeded")
    return store


def ids(history: History, **query) -> list[str]:
    return [row.id for row in run_rows(history, RunQuery(**query)).items]


def test_a_row_has_the_results_of_its_run(store: Store) -> None:
    with History(store) as history:
        results = run_row(history, FIRST).results
        assert (results.before, results.after) == (Accuracy(0.25, 0.15, 0.35), results.after)
        assert results.after == pytest.approx((0.75, 0.65, 0.85))
        # The last 10 steps of the second iteration: rewards of 15 to 24 are 1.
        assert (results.reward, results.loss) == (1.0, 0.5)
        assert (results.verdict, results.step, results.num_steps) == ("promoted", 24, 24)
        # Five stages of six ran.
        assert (results.tokens, results.gpu_hours, results.money) == (50, 2.5, 2.5)
        assert (results.stages, results.cached, results.currency) == (6, 1, "EUR")
        curve = sparkline(history, results, 1.0)
        assert (len(curve), curve[0], curve[-1]) == (24, 0.0, 1.0)
        assert run_row(history, SECOND).results.verdict == "not promoted"
        python = run_row(history, SFT)
        assert (python.results.loss, python.results.reward) == (0.75, None)
        assert (python.results.step, python.results.num_steps) == (2, 4)
        assert python.overrides == {"sft.num_steps": "4"}


def test_every_point_of_a_sweep_is_a_row(store: Store) -> None:
    with History(store) as history:
        points = [row for row in run_rows(history).items if row.node is not None]
        assert [dict(row.point) for row in reversed(points)] == POINTS
        assert [row.results.reward for row in reversed(points)] == [0.0, 1.0, 2.0, 3.0]
        assert points[0].results.after.value == pytest.approx(0.6)
        assert points[0].id == f"{SWEEP}:{points[0].node}"
        assert points[0].settings["seed"] == 1  # of the point, not of the base
        sweep = run_row(history, SWEEP)
        assert (sweep.results.after, sweep.results.reward) == (None, None)
        assert sweep.results.tokens == 80


def test_rows_are_sorted_by_results_and_settings_with_missing_ones_last(store: Store) -> None:
    with History(store) as history:
        assert ids(history)[0].startswith(f"{SWEEP}:")
        by_accuracy = ids(history, sort="-accuracy")
        assert by_accuracy[0] == FIRST
        assert set(by_accuracy[-2:]) == {SFT, SWEEP}
        assert ids(history, sort="grpo.learning_rate", workflow="grpo") == [FIRST, SECOND]
        assert ids(history, sort="-grpo.learning_rate", workflow="grpo") == [SECOND, FIRST]
        assert ids(history, sort="-accuracy", limit=1, offset=1) == [by_accuracy[1]]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (["accuracy>0.5", "gain>=0.5"], {FIRST}),
        (["generation.backend=vllm"], {SECOND}),
        (["reward=1", "seed=0"], {FIRST, SECOND}),
        (["verdict = not promoted"], {SECOND}),
        (["state=failed"], {SFT}),
    ],
)
def test_conditions_are_on_columns_and_settings(store: Store, where: list, expected: set) -> None:
    with History(store) as history:
        assert {each.partition(":")[0] for each in ids(history, where=where)} >= expected
        runs = run_rows(history, RunQuery(where=where)).items
        assert {row.id for row in runs if row.node is None} == expected


def test_unknown_columns_and_malformed_conditions_are_refused(store: Store) -> None:
    with History(store) as history:
        with pytest.raises(ConfigError, match="did you mean 'accuracy'"):
            ids(history, sort="acuracy")
        with pytest.raises(ConfigError, match="malformed"):
            ids(history, where=["accuracy"])
        with pytest.raises(NotRecordedError, match="matches several runs"):
            run_row(history, "20260101T00000")


def test_only_settings_that_differ_are_shown_and_those_of_a_backend_are_one(store: Store) -> None:
    with History(store) as history:
        rows = run_rows(history, RunQuery(workflow="grpo")).items
        names = differing(rows)
        assert names[FIRST] == names[SECOND] == ["generation.backend", "grpo.learning_rate"]
        assert shown_settings(rows[1], names[FIRST]) == {
            "generation.backend": "hf",
            "grpo.learning_rate": 0.1,
        }


def test_seeds_of_the_same_settings_are_one_group_with_a_band(store: Store) -> None:
    with History(store) as history:
        rows = run_rows(history, RunQuery(workflow="sweep", sort="started")).items
        groups = [group for group in grouped(rows, "seed") if group.rows[0].node is not None]
        assert [len(group.rows) for group in groups] == [2, 2]
        assert groups[0].label == "sweep learning_rate 0.1"
        # Rewards 0 and 2 of the first rate, 1 and 3 of the second.
        assert groups[0].band("reward") == (1.0, 0.0, 2.0, 2)
        assert groups[1].band("reward") == (2.0, 1.0, 3.0, 2)
        (sweep,) = grouped(rows, "sweep")
        assert sweep.band("tokens") == (20.0, 20.0, 20.0, 4)  # without the sum of the sweep


def test_labels_are_next_to_the_record_and_are_found(store: Store) -> None:
    set_labels(store, FIRST, name="baseline", tags=["paper"], note="first try")
    set_labels(store, FIRST, note="the good one")
    set_pin(store, SECOND, pinned=True)
    try:
        assert read_labels(store)[FIRST] == Labels("baseline", ("paper",), "the good one")
        assert (store.runs / SECOND / "pinned").exists()
        with History(store) as history:
            assert ids(history, tag="paper") == [FIRST]
            assert ids(history, text="GOOD ONE") == [FIRST]
            assert ids(history)[0] == SECOND
            assert record_of(run_row(history, FIRST))["name"] == "baseline"
        (store.root / LABELS).write_text("{")
        with History(store) as history, pytest.raises(StoreError, match="names and notes"):
            run_rows(history)
    finally:
        (store.root / LABELS).unlink()
        set_pin(store, SECOND, pinned=False)


def test_records_are_json(store: Store) -> None:
    with History(store) as history:
        records = json.loads(json.dumps([record_of(row) for row in run_rows(history).items]))
    assert {each["accuracy"] for each in records if each["run"] == SECOND} == {0.5}


def test_runs_metrics_and_rollouts_are_data_frames(store: Store) -> None:
    frame = nemo_rl_core.runs(store=store.root, workflow="grpo", sort="grpo.learning_rate")
    assert frame["id"].tolist() == [FIRST, SECOND]
    assert frame["grpo.learning_rate"].tolist() == [0.1, 0.2]
    assert frame["accuracy"].tolist() == [0.75, 0.5]
    assert str(frame["started_at"].dtype).startswith("datetime64[ns, UTC")

    curves = nemo_rl_core.run_metrics(FIRST, "reward", store=store.root)
    assert curves["step"].tolist() == list(range(1, 25))
    assert curves["reward"].sum() == 10.0
    with pytest.raises(ConfigError, match="no metric 'rewrd'"):
        nemo_rl_core.run_metrics(FIRST, "rewrd", store=store.root)

    completions = nemo_rl_core.run_rollouts(FIRST, store=store.root)
    assert completions[["step", "completion", "reward"]].values.tolist() == [[13, "four", 1.0]]
    assert nemo_rl_core.run_rollouts(SFT, store=store.root).empty


def test_an_empty_store_has_no_frame(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no record of any run"):
        nemo_rl_core.runs(store=tmp_path)


def test_a_point_has_only_its_stages_and_metrics(store: Store, monkeypatch) -> None:
    monkeypatch.setenv("NEMO_RL_HOME", str(store.root))
    with History(store) as history:
        rows = run_rows(history, RunQuery(workflow="sweep", where=["reward=2"])).items
    (point,) = [row.id for row in rows]

    def output(*words: str) -> str:
        return CliRunner().invoke(cli.group, words).stdout

    assert output("metrics", point, "reward", "--csv").splitlines()[1:] == [
        '"grpo_iteration 1 (seed 1, learning_rate 0.1)",1,reward,2.0'
    ]
    shown = json.loads(output("runs", point, "--json"))
    stages = [node["name"] for node in shown["nodes"]]
    assert [name.partition(" ")[0] for name in stages] == [
        "sweep_point",
        "grpo_iteration",
        "evaluate",
    ]
    assert output("runs", point).count("evaluation: ") == 1


def test_a_run_that_diverged_has_no_finite_reward_and_is_last(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    for run, rewards in ((FIRST, (2.0, math.nan)), (SECOND, (math.nan, 1.0)), (SFT, (3.0, 5.0))):
        recorder = Recorder(store, run, "workflows.grpo.grpo", {"seed": 0})
        metrics = {step: {"reward": reward} for step, reward in enumerate(rewards, 1)}
        recorder.stage("grpo_iteration 1", metrics=metrics)
        recorder.writer.end("succeeded")
    with History(store) as history:
        assert math.isnan(run_row(history, FIRST).results.reward)
        assert run_row(history, SECOND).results.reward == 1.0  # of the finite step
        assert ids(history, sort="reward") == [SECOND, SFT, FIRST]
        assert ids(history, sort="-reward") == [SFT, SECOND, FIRST]


def test_a_group_averages_plain_runs_with_points(store: Store) -> None:
    with History(store) as history:
        (group,) = [g for g in grouped(run_rows(history).items, "state") if g.key == "succeeded"]
    # Two runs with 1 and points with 0, 1, 2 and 3; the sweep itself is left out.
    assert group.band("reward") == (8 / 6, 0.0, 3.0, 6)


def test_columns_that_no_run_has_are_refused(store: Store) -> None:
    with History(store) as history:
        # The only row on the page is of a sweep, whose settings have no `generation`.
        columns = ["generation.backend", "generation", "seed", "reward"]
        assert len(ids(history, columns=columns, limit=1)) == 1
        with pytest.raises(ConfigError, match="no run has the column 'nope'"):
            ids(history, columns=["seed", "nope"], limit=1)


def test_settings_of_several_workflows_and_of_no_rows_are_columns(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    for run, workflow, seed in ((FIRST, "grpo", 1), (SECOND, "sft", 2)):
        config = {"seed": seed, workflow: {"num_steps": 4}}
        Recorder(store, run, f"workflows.{workflow}.{workflow}", config).writer.end("succeeded")
    frame = nemo_rl_core.runs(store=store.root, sort="started")
    assert frame["seed"].tolist() == [1, 2]
    assert "grpo.num_steps" not in frame  # the only value of its workflow
    empty = nemo_rl_core.runs(store=store.root, state="failed")
    assert (len(empty), empty["reward"].tolist()) == (0, [])
