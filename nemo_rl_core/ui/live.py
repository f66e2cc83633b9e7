"""The present state of a running run: stage, step, speed, time left, and alarms."""

import math
import time
from dataclasses import dataclass

from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import LAST_STEP, RUN_SECONDS, Execution, Node
from nemo_rl_core.telemetry.alarms import Alarm, no_step
from nemo_rl_core.ui import curves

_STEPS_OF_SPEED = 20
_FIGURES = {"reward": "reward", "loss": "loss", "timings/tokens_per_second": "tokens per second"}


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Present state of a run.

    Attributes:
        stage: The running stage that began last; None if none runs.
        number: Number of stages that have begun.
        expected: Number of stages of the last run of the recipe that succeeded, if there is one.
        step: Last step, numbered over the full run; `last_step` is where the stage ends.
        figures: Latest reward or loss, and speed, by label.
        seconds_left: Expected time until the stage's last step.
    """

    stage: Node | None
    number: int
    expected: int | None
    step: int | None
    last_step: int | None
    figures: dict[str, float]
    seconds_left: float | None
    alarms: list[tuple[str, Alarm]]
    is_running: bool


def run_status(history: History, run: Execution) -> RunStatus:
    """Returns the state of a run; one that has ended has only alarms."""
    tasks = [node for node in history.nodes(run.id) if node.kind == "task"]
    running = [node for node in tasks if node.state == "running"]
    stage = running[-1] if running and run.state == "running" else None
    alarms = _alarms(history, run)
    expected = history.num_tasks_before(run) if stage else None
    if expected is not None and expected < len(tasks):
        expected = None
    if stage is None:
        return RunStatus(
            None, len(tasks), None, None, None, {}, None, alarms, run.state == "running"
        )
    figures = {
        label: value[1]
        for name, label in _FIGURES.items()
        if (value := history.last_value(stage.id, name)) and math.isfinite(value[1])
    }
    if "reward" in figures:
        figures.pop("loss", None)
    last = history.last_value(stage.id, LAST_STEP)
    times = history.metrics(
        stage.id,
        names=[RUN_SECONDS],
        since_step=last[0] - _STEPS_OF_SPEED if last else None,
    ).get(RUN_SECONDS, [])
    seconds_left = None
    if last and len(times) > 1:
        per_step = (times[-1][1] - times[0][1]) / (times[-1][0] - times[0][0])
        seconds_left = per_step * (last[1] - last[0])
    if times and (alarm := no_step(time.time() - run.started_at - times[-1][1])):
        alarms.append((stage.title, alarm))
    step, last_step = (last[0], round(last[1])) if last else (None, None)
    return RunStatus(
        stage, len(tasks), expected, step, last_step, figures, seconds_left, alarms, True
    )


def _alarms(history: History, run: Execution) -> list[tuple[str, Alarm]]:
    """Returns the alarms of each stage, present ones first."""
    alarms: list[tuple[str, Alarm]] = []
    for stage in curves.stages(history, run.id):
        task = stage.task.rpartition(".")[2]
        for training, alarm in curves.alarms_of(history, stage):
            alarms.append((f"{task} ({training.label})" if training.label else task, alarm))
    return sorted(alarms, key=lambda each: each[1].is_over)
