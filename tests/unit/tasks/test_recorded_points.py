"""The record of a sweep: every point with its stages, curves and artifacts."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from flytekit import map_task, task, workflow

import workflows
from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import Node, point_label
from nemo_rl_core.produce import StageResult
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.events import labeled, report, subscribe
from nemo_rl_core.types import StepReport
from nemo_rl_core.ui import curves
from tasks.artifacts import Checkpoint, CheckpointArtifact, Dataset, DatasetArtifact
from tasks.local_run.run import RunFailed
from tasks.stage.stage import cached_task, dynamic_stage, make, run_inside

assert workflows  # wraps flytekit's local execution when it is imported
POINTS = [{"seed": seed, "grpo.rate": rate} for seed in (0, 1) for rate in (0.1, 0.2)]
LABELS = [f"seed {seed}, rate {rate}" for seed in (0, 1) for rate in (0.1, 0.2)]


class Point(FrozenConfig):
    point: dict[str, int | float]
    fails: bool = False
    stops: bool = False


class Training(FrozenConfig):
    rate: float


def reward(point: dict[str, float], step: int) -> float:
    return step + point["grpo.rate"] + 10 * point["seed"]


@cached_task()
def started(config: Training) -> Checkpoint:
    """A supervised start, which a sweep runs once per seed."""

    def work(folder: Path) -> StageResult:
        report(StepReport("started", 1, 1, {"loss": config.rate, "global_step": 1.0}))
        (folder / "text.txt").write_text(str(config.rate))
        return StageResult("checkpoint", "text", num_tokens=3)

    return CheckpointArtifact(**make(__name__, "started", config=config, parents={}, work=work))


@cached_task()
def iteration_of(config: Point, start: Checkpoint, iteration: int) -> Checkpoint:
    def work(folder: Path) -> StageResult:
        for step in (1, 2):
            number = 2 * (iteration - 1) + step
            metrics = {"reward": reward(config.point, number), "global_step": float(number)}
            report(StepReport(f"iteration_of {iteration}", step, 2, metrics))
        if config.stops and iteration == 2:
            signal.raise_signal(signal.SIGINT)
        if config.fails and iteration == 2:
            raise ValueError("the judge does not answer")
        (folder / "text.txt").write_text(f"{config.point} {iteration}")
        return StageResult("checkpoint", "text", num_tokens=10, step=2 * iteration)

    inputs = {"config": config, "parents": {"start": start}, "part": str(iteration)}
    return CheckpointArtifact(**make(__name__, "iteration_of", work=work, **inputs))


@cached_task()
def swept_point(config: Point, start: Checkpoint) -> Dataset:
    def work(folder: Path) -> StageResult:
        checkpoint = start
        for iteration in (1, 2):
            inputs = {"config": config, "start": checkpoint, "iteration": iteration}
            with labeled(point_label(config.point)):
                checkpoint = run_inside(iteration_of, **inputs)
        (folder / "text.txt").write_text(checkpoint.content_hash)
        return StageResult("report", "text", "done", num_tokens=20)

    parents = {"start": start}
    return DatasetArtifact(
        **make(__name__, "swept_point", config=config, parents=parents, work=work)
    )


@dynamic_stage
def mapped(points: list[Point]) -> list[Dataset | None]:
    starts = {seed: started(config=Training(rate=1.0 + seed)) for seed in (0, 1)}
    return map_task(swept_point, min_success_ratio=0.5)(
        config=points, start=[starts[each.point["seed"]] for each in points]
    )


@workflow
def sweep(points: list[Point]) -> list[Dataset | None]:
    return mapped(points=points)


def run(*points: dict[str, float], fails: bool = False) -> None:
    sweep(points=[Point(point=point, fails=fails and point["seed"] == 1) for point in points])


@pytest.fixture
def history(own_store: Path) -> Callable[[], History]:
    return lambda: History(Store(own_store))


def latest(read: History) -> list[Node]:
    return read.nodes(read.executions().items[0].id)


def check_points(read: History, nodes: list[Node]) -> None:
    """Every point is a node with its iterations inside, which have their curves and artifacts."""
    (mapped_node,) = [node for node in nodes if "arraynode" in node.task]
    points = [node for node in nodes if node.parent == mapped_node.id]
    assert [node.point for node in points] == POINTS
    assert [node.name for node in points] == [f"swept_point ({label})" for label in LABELS]
    for point in points:
        inner = [node for node in nodes if node.parent == point.id]
        assert [node.name for node in inner] == ["iteration_of 1", "iteration_of 2"]
        for number, node in enumerate(inner):
            steps = (2 * number + 1, 2 * number + 2)
            assert read.metrics(node.id)["reward"] == [(s, reward(point.point, s)) for s in steps]
            assert node.point == point.point
            (output,) = read.node(node.id).outputs
            made = read.artifact(output.artifact or "")
            assert made.stage == node.name
            assert made.made_by == (node.cached_from or node.id)


@pytest.mark.slow
def test_every_point_is_a_node_with_its_curves_and_artifacts(
    history: Callable[[], History], capfd: pytest.CaptureFixture[str]
) -> None:
    run(*POINTS)
    output = capfd.readouterr().out
    with history() as read:
        nodes = latest(read)
        check_points(read, nodes)
        # The cost of a point is that of its stages, counted once.
        assert sum(node.cost.get("tokens", 0) for node in nodes) == 2 * 3 + 4 * 2 * 10
        iterations = [node for node in nodes if node.name == "iteration_of 2"]
        edges = {(edge.source, edge.target) for edge in read.edges(iterations[0].execution)}
        for node in iterations:
            assert (node.id - 1, node.id) in edges
    total = next(line for line in output.splitlines() if line.startswith("│ total"))
    assert total.split("│")[4].strip() == "86"
    assert "iteration_of 1 (seed 1, rate 0.2)  started\n" in output
    assert "iteration_of 2 (seed 1, rate 0.2) 1/2  reward 13.200\n" in output
    assert "swept_point (seed 0, rate 0.1)  ran  " in output


@pytest.mark.slow
def test_a_cached_sweep_has_the_curves_of_its_points(history: Callable[[], History]) -> None:
    run(*POINTS[:3])
    run(*POINTS)  # three points are found in the store
    run(*POINTS)  # the list of all is found in flytekit's cache
    with history() as read:
        for execution in read.executions().items[:2]:
            check_points(read, read.nodes(execution.id))
        nodes = latest(read)
        assert {node.state for node in nodes if node.point} == {"cached"}
        (mapped_node,) = [node for node in nodes if "arraynode" in node.task]
        assert mapped_node.state == "cached"
        # Its maker has the makers of its points.
        assert read.node(mapped_node.cached_from or 0).node.task == mapped_node.task
        assert sum(node.cost.get("tokens", 0) for node in nodes) == 0


@pytest.mark.slow
def test_a_failed_point_is_recorded_with_its_steps_and_its_reason(
    history: Callable[[], History], capfd: pytest.CaptureFixture[str]
) -> None:
    run(*POINTS, fails=True)
    output = capfd.readouterr().out
    with history() as read:
        nodes = latest(read)
        failed = [node for node in nodes if node.state == "failed"]
        assert [node.name for node in failed if "(" in node.name] == [
            f"swept_point ({label})" for label in LABELS[2:]
        ]
        assert all("the judge does not answer" in node.error for node in failed)
        stopped = next(node for node in failed if node.name == "iteration_of 2")
        assert len(read.metrics(stopped.id)["reward"]) == 2
        (run_,) = read.executions().items
        assert run_.state == "succeeded"
    lines = [line for line in output.splitlines() if "does not answer" in line]
    assert [line.partition("  FAILED")[0] for line in lines] == [
        f"swept_point ({label})" for label in LABELS[2:]
    ]
    with pytest.raises(RunFailed, match="the judge does not answer"):
        run(POINTS[2], fails=True)


@pytest.mark.slow
def test_a_stopped_point_has_its_position_and_costs_its_time_once(
    history: Callable[[], History],
) -> None:
    with pytest.raises(KeyboardInterrupt):
        sweep(points=[Point(point=POINTS[0]), Point(point=POINTS[3], stops=True)])
    with history() as read:
        (stopped_run,) = read.executions().items
        nodes = latest(read)
    where = f"at step 2 of 2 of iteration_of 2 ({LABELS[3]})"
    assert stopped_run.error.startswith(f"stopped from outside (Ctrl-C) {where}, after ")
    stopped = [node for node in nodes if node.state == "stopped"]
    assert [node.name for node in stopped if node.cost] == ["iteration_of 2"]


@pytest.mark.slow
def test_charts_have_one_line_per_training(history: Callable[[], History]) -> None:
    run(*POINTS)
    with history() as read:
        (execution,) = read.executions().items
        stages = {stage.task: stage for stage in curves.stages(read, execution.id)}
        iterations = stages[f"{__name__}.iteration_of"]
        lines = curves.series(read, iterations.nodes, iterations.names)["reward"]
        assert {line.label: list(line.points) for line in lines} == {
            label: [(step, reward(point, step)) for step in (1, 2, 3, 4)]
            for label, point in zip(LABELS, POINTS, strict=True)
        }
        assert [line.color for line in lines] == [0, 1, 2, 3]
        # Two supervised starts of one run are two trainings.
        starts = stages[f"{__name__}.started"]
        losses = curves.series(read, starts.nodes, starts.names)["loss"]
        assert {line.label: list(line.points) for line in losses} == {
            "call 1": [(1, 1.0)],
            "call 2": [(1, 2.0)],
        }


@task
def twice() -> int:
    """Two trainings in one task, as two calls of `fit` are."""
    for rate in (1.0, 2.0):
        for step in (1, 2):
            report(StepReport("sft", step, 2, {"loss": rate * step, "global_step": float(step)}))
    return 2


@workflow
def training_twice() -> int:
    return twice()


def test_two_trainings_of_one_task_keep_their_steps(history: Callable[[], History]) -> None:
    training_twice()
    with history() as read:
        first, second = latest(read)
        assert (second.name, second.parent, second.state) == ("sft", first.id, "succeeded")
        assert read.metrics(first.id)["loss"] == [(1, 1.0), (2, 2.0)]
        assert read.metrics(second.id)["loss"] == [(1, 2.0), (2, 4.0)]
        (stage,) = curves.stages(read, first.execution)
        lines = curves.series(read, stage.nodes, ["loss"])["loss"]
        assert [line.label for line in lines] == ["call 1", "call 2"]


@pytest.mark.slow
@pytest.mark.usefixtures("own_store")
def test_reports_name_the_call_of_a_stage_that_runs_twice() -> None:
    seen: list[str] = []
    unsubscribe = subscribe(
        lambda event: seen.append(event.stage) if isinstance(event, StepReport) else None
    )
    run(POINTS[0])
    unsubscribe()
    assert seen[:3] == ["started", "started (2)", "iteration_of 1 (seed 0, rate 0.1)"]
