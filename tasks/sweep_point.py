"""Stage: one point of a sweep, a GRPO run and its evaluation.

It is a single task, as `map_task` requires. The stages inside it are those of the workflow `grpo`:
each is kept in the store under its own inputs, so that an interrupted point resumes from its last
save, and a point that was run before as a workflow is found there.
"""

import json
from pathlib import Path

from nemo_rl_core.history.records import point_label
from nemo_rl_core.produce import StageResult
from nemo_rl_core.store.files import write_atomic
from nemo_rl_core.telemetry.events import labeled
from nemo_rl_core.telemetry.metrics import MetricsFile
from tasks.artifacts import Artifact, Checkpoint, CheckpointArtifact, Dataset, PointReport, Report
from tasks.evaluate import evaluate
from tasks.grpo_iteration import grpo_iteration
from tasks.pods.resources import TRAIN
from tasks.recipes.sweep import PointTaskConfig
from tasks.stage.stage import cached_task, make, run_inside

NUMERICS_VERSION = 2
_CURVE = "reward"


@cached_task(TRAIN)
def sweep_point(
    config: PointTaskConfig,
    start: Checkpoint,
    train: Dataset,
    validation: Dataset,
    questions: Dataset | None,
) -> Report:
    """Trains for all iterations, and evaluates the last checkpoint."""
    assert questions is not None, "GRPO trains on prompts only, and held-out ones are questions"

    def work(folder: Path) -> StageResult:
        with labeled(point_label(config.point)):
            checkpoints = _train(config, start, train, validation)
            report = run_inside(
                evaluate,
                config=config.evaluation,
                checkpoint=checkpoints[-1],
                validation=questions,
            )
        curve = [point for each in checkpoints for point in _curve(each)]
        steps, rewards = [step for step, _ in curve], [reward for _, reward in curve]
        result = {"metrics": report.metrics, "steps": steps, "rewards": rewards}
        write_atomic(folder / "point.json", json.dumps(result, indent=1))
        artifacts = [*checkpoints, report]
        return StageResult(
            "sweep_point",
            "json",
            report.summary,
            num_tokens=sum(each.manifest.cost.tokens for each in artifacts),
            peak_memory_gib=max(each.manifest.cost.peak_memory_gib for each in artifacts),
            step=checkpoints[-1].step,
            # The cost of this stage does not include stages that it found in the store.
            figures={"wall_seconds": sum(each.manifest.cost.wall_seconds for each in artifacts)},
        )

    parents: dict[str, Artifact] = {"start": start, "train": train}
    parents |= {"validation": validation, "questions": questions}
    fields = make(__name__, "sweep_point", config=config, parents=parents, work=work)
    result = json.loads((Path(fields["directory"].path) / "point.json").read_text())
    return PointReport(**fields, **result)


def _train(
    config: PointTaskConfig, start: CheckpointArtifact, train: Dataset, validation: Dataset
) -> list[CheckpointArtifact]:
    checkpoints = [start]
    validation_argument = (
        {"validation": validation} if config.grpo.grpo.validate_every_num_steps else {}
    )
    for iteration in range(1, config.num_iterations + 1):
        checkpoints.append(
            run_inside(
                grpo_iteration,
                config=config.grpo,
                start=checkpoints[-1],
                reference=start,
                train=train,
                iteration=iteration,
                **validation_argument,
            )
        )
    return checkpoints[1:]


def _curve(checkpoint: CheckpointArtifact) -> list[tuple[int, float]]:
    lines = MetricsFile(checkpoint.folder / "metrics.jsonl").read()
    return [
        (int(line.metrics["global_step"]), line.metrics[_CURVE])
        for line in lines
        if _CURVE in line.metrics
    ]
