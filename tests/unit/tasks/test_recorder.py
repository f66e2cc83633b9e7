"""The database records runs of real flytekit workflows.

These tests fail when flytekit changes what the recorder wraps.
"""

import inspect
import json
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
from flytekit import dynamic, task, workflow
from flytekit.core.base_task import Task
from flytekit.core.workflow import WorkflowBase

import workflows
from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import RUN_SECONDS, Node
from nemo_rl_core.produce import StageResult, cost_html
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.events import StageResumed, StageSaved, publish, report
from nemo_rl_core.types import StepReport
from tasks.artifacts import Checkpoint, CheckpointArtifact, Dataset, DatasetArtifact
from tasks.local_run.run import RunFailed, _execution, install_recording, recipe_name
from tasks.recipes.grpo import GRPORecipe
from tasks.recipes.sweep import SweepRecipe
from tasks.stage.stage import cached_task, make

assert workflows  # wraps flytekit's local execution when it is imported


class Words(FrozenConfig):
    text: str = "a"
    broken: bool = False
    stopped: bool = False


class Plan(NamedTuple):
    rows: Words
    training: Words


class Rows(NamedTuple):
    train: Dataset
    validation: Dataset


@task
def plan(config: Words) -> Plan:
    return Plan(config, Words(**{**config.model_dump(), "text": config.text + "!"}))


def dataset(config: Words, part: str) -> DatasetArtifact:
    def work(folder: Path) -> StageResult:
        (folder / "text.txt").write_text(f"{config.text} {part}")
        return StageResult("dataset", "text", part, num_tokens=3, deck="<p>rows</p>")

    return DatasetArtifact(
        **make(__name__, "rows", config=config, parents={}, work=work, part=part)
    )


@cached_task(deck_fields=())
def rows(config: Words) -> Rows:
    return Rows(dataset(config, "train"), dataset(config, "validation"))


@cached_task(deck_fields=())
def training(config: Words, start: Checkpoint, train: Dataset, iteration: int) -> Checkpoint:
    def work(folder: Path) -> StageResult:
        publish(StageResumed(10))
        metrics = {"loss": 2.0, "global_step": 11.0, "num_valid_tokens": 5.0}
        report(StepReport("training", 1, 2, metrics, {"train": 0.5}))
        if config.stopped and iteration == 2:
            publish(StageSaved(11))
            report(StepReport("training", 2, 2, {"loss": 1.0, "global_step": 12.0}))
            signal.raise_signal(signal.SIGINT)
        if config.broken and iteration == 2:
            raise ValueError("no such luck")
        (folder / "text.txt").write_text(f"{start.content_hash} {iteration}")
        step, summary = 10 * iteration, f"iteration {iteration}"
        return StageResult("checkpoint", "text", summary, num_tokens=50, step=step)

    parents = {"start": start, "train": train}
    fields = make(
        __name__, "training", config=config, parents=parents, work=work, part=str(iteration)
    )
    return CheckpointArtifact(**fields)


@cached_task(deck_fields=())
def base(config: Words) -> Checkpoint:
    def work(folder: Path) -> StageResult:
        (folder / "text.txt").write_text(config.text)
        return StageResult("checkpoint", "text")

    return CheckpointArtifact(**make(__name__, "base", config=config, parents={}, work=work))


@cached_task(deck_fields=())
def choose(candidates: list[Checkpoint], train: Dataset) -> Checkpoint:
    return candidates[-1]


@dynamic
def iterate(config: Words, start: Checkpoint, train: Dataset, count: int) -> Checkpoint:
    checkpoint = start
    for iteration in range(1, count + 1):
        checkpoint = training(config=config, start=checkpoint, train=train, iteration=iteration)
    return checkpoint


@dynamic
def pass_on(data: Dataset) -> Dataset:
    return data


@workflow
def begin(config: Words) -> Rows:
    inputs = rows(config=config)
    return Rows(inputs.train, inputs.validation)


DEFAULT = Words()


@workflow
def pipeline(config: Words = DEFAULT) -> Checkpoint:
    stages = plan(config=config)
    data = begin(config=stages.rows)
    seen = pass_on(data=data.validation)
    start = base(config=stages.rows)
    trained = iterate(config=stages.training, start=start, train=data.train, count=2)
    return choose(candidates=[start, trained], train=seen)


@pytest.fixture
def history(own_store: Path) -> Store:
    return Store(own_store)


def edges_of(history: History, execution: str) -> set[tuple[str, str, str, str]]:
    names = {node.id: node.name for node in history.nodes(execution)}
    return {
        (names[each.source], each.source_output, names[each.target], each.target_input)
        for each in history.edges(execution)
    }


EDGES = {
    ("plan", "rows", "begin", "config"),
    ("plan", "rows", "rows", "config"),
    ("plan", "rows", "base", "config"),
    ("plan", "training", "iterate", "config"),
    ("plan", "training", "training 1", "config"),
    ("plan", "training", "training 2", "config"),
    ("rows", "train", "iterate", "train"),
    ("rows", "train", "training 1", "train"),
    ("rows", "train", "training 2", "train"),
    ("rows", "validation", "pass_on", "data"),
    ("base", "o0", "iterate", "start"),
    ("base", "o0", "training 1", "start"),
    ("training 1", "o0", "training 2", "start"),
    ("training 2", "o0", "choose", "candidates"),
    ("base", "o0", "choose", "candidates"),
    ("pass_on", "o0", "choose", "train"),
}


def by_name(nodes: list[Node]) -> dict[str, Node]:
    return {node.name: node for node in nodes}


def test_flytekit_has_the_expected_signatures() -> None:
    """The parts of flytekit that the recorder depends on, by their signatures."""

    def parameters(function: object) -> list[str]:
        return list(inspect.signature(inspect.unwrap(function)).parameters)

    install_recording()
    assert parameters(WorkflowBase.local_execute) == ["self", "ctx", "kwargs"]
    assert parameters(Task.local_execute) == ["self", "ctx", "kwargs"]
    assert parameters(Task.sandbox_execute) == ["self", "ctx", "input_literal_map"]
    for function in (WorkflowBase.local_execute, Task.local_execute, Task.sandbox_execute):
        assert hasattr(function, "__wrapped__")


def test_nodes_edges_and_values_of_a_run(history: Store) -> None:
    pipeline(config=Words(text="b"))
    with History(history) as read:
        (run,) = read.executions().items
        assert run.state == "succeeded" and run.workflow.endswith("test_recorder.pipeline")
        assert run.inputs == {"config": {"text": "b", "broken": False, "stopped": False}}
        nodes = by_name(read.nodes(run.id))
        assert [(node.name, node.kind, node.state) for node in read.nodes(run.id)] == [
            ("plan", "task", "succeeded"),
            ("begin", "workflow", "succeeded"),
            ("rows", "task", "succeeded"),
            ("pass_on", "dynamic", "succeeded"),
            ("base", "task", "succeeded"),
            ("iterate", "dynamic", "succeeded"),
            ("training 1", "task", "succeeded"),
            ("training 2", "task", "succeeded"),
            ("choose", "task", "succeeded"),
        ]
        assert nodes["rows"].parent == nodes["begin"].id
        assert nodes["training 2"].parent == nodes["iterate"].id
        assert nodes["begin"].parent is None
        assert edges_of(read, run.id) == EDGES

        made = nodes["rows"]
        assert made.cost["tokens"] == 6 and made.summary == "train, validation"
        cost = Manifest.read(Path(made.deck_path).parent).cost
        assert Path(made.deck_path).read_text() == "<p>rows</p>" + cost_html(cost)
        detail = read.node(nodes["training 2"].id)
        values = {value.name: value for value in detail.inputs}
        assert json.loads(values["config"].value) == {
            "text": "b!",
            "broken": False,
            "stopped": False,
        }
        assert (values["config"].type, values["iteration"].value) == ("Words", "2")
        assert values["train"].type == "DatasetArtifact"
        assert values["train"].artifact == read.node(made.id).outputs[0].artifact
        (attempt,) = detail.attempts
        assert (attempt.state, attempt.resumed_from_step) == ("succeeded", 10)
        measured = read.metrics(detail.node.id)
        ((step, run_seconds),) = measured.pop(RUN_SECONDS)
        assert step == 11 and 0 < run_seconds < 60
        assert measured == {
            "progress/num_tokens": [(11, 5.0)],
            "progress/last_step": [(11, 12.0)],
            "loss": [(11, 2.0)],
            "global_step": [(11, 11.0)],
            "num_valid_tokens": [(11, 5.0)],
            "timings/train": [(11, 0.5)],
        }
        candidates = {value.name: value for value in read.node(nodes["choose"].id).inputs}
        assert len(json.loads(candidates["candidates"].value)) == 2
        artifact = read.artifact(detail.outputs[0].artifact or "")
        # The tokens of the steps before the resume do not count as a cost of this attempt.
        assert (detail.node.cost["tokens"], artifact.manifest["cost"]["tokens"]) == (5, 50)
        # Three more nodes returned it.
        assert artifact.made_by == nodes["training 2"].id
        roles = {each.role for each in read.ancestry(artifact.id).parentage}
        assert roles == {"start", "train"}


def test_hits_are_recorded_with_their_origin(history: Store) -> None:
    pipeline(config=Words(text="b"))
    pipeline(config=Words(text="b"))
    with History(history) as read:
        again, first = read.executions().items
        assert edges_of(read, again.id) == EDGES
        assert (first.num_cached, again.num_cached) == (0, 5)
        before = by_name(read.nodes(first.id))
        for node in read.nodes(again.id):
            hit = node.name in {"rows", "base", "training 1", "training 2", "choose"}
            assert node.state == ("cached" if hit else "succeeded")
            assert node.cached_from == (before[node.name].id if hit else None)
            assert node.cost["tokens"] == 0


def test_a_failed_node_has_its_reason(history: Store) -> None:
    with pytest.raises(RunFailed):
        pipeline(config=Words(broken=True))
    with History(history) as read:
        (run,) = read.executions().items
        assert run.state == "failed" and "no such luck" in run.error
        states = {node.name: node.state for node in read.nodes(run.id)}
        assert states["training 1"] == "succeeded"
        assert (states["training 2"], states["iterate"]) == ("failed", "failed")
        failed = by_name(read.nodes(run.id))["training 2"]
        assert "no such luck" in failed.error
        assert read.node(failed.id).attempts[-1].state == "failed"


def test_a_stopped_run_records_position_and_cost(
    history: Store, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        pipeline(config=Words(stopped=True))
    with History(history) as read:
        (run,) = read.executions().items
        nodes = by_name(read.nodes(run.id))
    assert run.state == "stopped"
    first, saved, command = run.error.splitlines()
    assert first.startswith("stopped from outside (Ctrl-C) at step 2 of 2 of training 2, after ")
    assert saved == "  saved: step 1 of training 2, and the 3 stages before it"
    assert command.startswith("  resume with: ")
    assert (nodes["training 2"].state, nodes["iterate"].state) == ("stopped", "stopped")
    assert nodes["training 2"].error == "stopped from outside at step 2 of 2 of training 2"
    assert nodes["training 2"].cost["wall_seconds"] > 0
    assert nodes["training 1"].state == "succeeded"
    shown = capfd.readouterr().out
    assert "training 2  STOPPED" in shown
    assert shown.index("│ total") < shown.index(first)


def test_nodes_have_their_part_of_the_log(history: Store) -> None:
    pipeline()
    with History(history) as read:
        (run,) = read.executions().items
        nodes = read.nodes(run.id)
        for node in nodes:
            assert node.log_from is not None and node.log_to is not None
            assert 0 <= node.log_from <= node.log_to <= Path(run.log_path).stat().st_size


@pytest.mark.parametrize(
    ("command", "recipe"),
    [
        (["pyflyte", "run", "f.py", "grpo"], ""),
        (
            ["pyflyte", "run", "f.py", "grpo", "--config", "workflows/recipes/grpo_ci.yaml"],
            "grpo_ci",
        ),
        (["pyflyte", "run", "f.py", "grpo", "--config=a/b.yml"], "b"),
        (["pyflyte", "run", "f.py", "grpo", "--config", '{"recipe": "sft_x", "seed": 1}'], "sft_x"),
        (["pyflyte", "run", "f.py", "grpo", "--config", '{"seed": 1}'], ""),
        (["pyflyte", "run", "f.py", "grpo", "--config", "{"], ""),
        (["pyflyte", "run", "f.py", "grpo", "--config"], ""),
    ],
)
def test_recipe_names_are_read_from_commands(command: list[str], recipe: str) -> None:
    assert recipe_name(command) == recipe


def test_a_run_without_a_recipe_has_the_name_of_the_default_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from workflows.grpo import DEFAULT, grpo

    # Else that of pytest, whose arguments may end in a recipe.
    monkeypatch.setattr("sys.argv", ["pyflyte", "run", "workflows/grpo.py", "grpo"])

    def named(config: object) -> str:
        return _execution(grpo, {"config": config}, Path("run.log")).recipe

    assert named(DEFAULT) == named(DEFAULT.model_copy()) == "grpo_arithmetic"
    assert named(DEFAULT.replace(seed=7)) == ""


def test_the_record_of_a_recipe_has_its_isolated_packages(tmp_path: Path) -> None:
    (tmp_path / "pins.txt").write_text("six==1.17.0\n")
    recipe = GRPORecipe.model_validate(
        {"isolation": {"training": {"requirements": str(tmp_path / "pins.txt")}}}
    )
    sweep = SweepRecipe(base=recipe, over={"seed": [1, 2]})
    inputs = _execution(pipeline, {"a": recipe, "b": sweep}, tmp_path).inputs
    expected = {"requirements": None, "folder": None, "packages": ["six==1.17.0"]}
    for recorded in (inputs["a"], inputs["b"]["base"]):
        assert recorded["isolation"]["training"] == expected
