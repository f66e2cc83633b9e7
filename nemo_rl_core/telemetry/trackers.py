"""The trackers; each imports its library when it is opened, since few runs use any."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nemo_rl_core.config.tracking import (
    JsonLinesTracker,
    MlflowTracker,
    OtlpTracker,
    TensorBoardTracker,
    TrackerConfig,
    WandbTracker,
)
from nemo_rl_core.telemetry.logger_facade import Outcome, Part, Tracker
from nemo_rl_core.telemetry.otlp import Otlp

_MLFLOW_STATES: Mapping[Outcome, str] = {
    "succeeded": "FINISHED",
    "failed": "FAILED",
    "stopped": "KILLED",
}


def open_tracker(
    config: TrackerConfig,
    run: str,
    labels: Mapping[str, str] = MappingProxyType({}),
    *,
    of: Part = "run",
) -> Tracker:
    """Opens a tracker.

    Args:
        config: The tracker's config.
        run: Name of the run in the tracker.
        labels: What else tells the run from others, for trackers with labels.
        of: What ends with the tracker, for those that tell a run's end from that of a stage.

    Raises:
        ImportError: If its library is not installed; the library may raise other errors.
    """
    match config:
        case JsonLinesTracker():
            return JsonLines(Path(config.path))
        case TensorBoardTracker():
            return TensorBoard(Path(config.folder) / run)
        case MlflowTracker():
            return Mlflow(config, run)
        case WandbTracker():
            return Wandb(config, run)
        case OtlpTracker():
            return Otlp(config, run, labels, of=of)


def _group(stage: str) -> str:
    """The name of a stage in characters that every service accepts in names of metrics.

    Example:
        >>> _group("grpo_iteration 1 (seed 0, learning_rate 0.0002)")
        'grpo_iteration 1 - seed 0 - learning_rate 0.0002'
    """
    return re.sub(r"\s*[^\w\s.:-]+\s*", " - ", stage).strip(" -")


def _tags(stage: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Prefixes names with the stage, by which services group them."""
    return {f"{_group(stage)}/{name}": value for name, value in metrics.items()}


class JsonLines:
    """Appends one JSON object per step to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path.expanduser()

    def log_metrics(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Adds one line.

        Raises:
            OSError: If the disk refuses.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps({"stage": stage, "step": step, **metrics}) + "\n")

    def close(self, outcome: Outcome) -> None:
        """Does nothing: every line is written at once."""


class TensorBoard:
    """TensorBoard event files."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder.expanduser()))

    def log_metrics(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Adds one scalar per metric."""
        for name, value in _tags(stage, metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, outcome: Outcome) -> None:
        """Closes the file."""
        self._writer.close()


class Mlflow:
    """A run on an MLflow server or in a local folder."""

    def __init__(self, config: MlflowTracker, run: str) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=config.tracking_uri)
        known = self._client.get_experiment_by_name(config.experiment)
        experiment = (
            known.experiment_id if known else self._client.create_experiment(config.experiment)
        )
        self._run = self._client.create_run(experiment, run_name=run).info.run_id

    def log_metrics(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the step in one request."""
        import time

        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        entities = [Metric(name, value, now, step) for name, value in _tags(stage, metrics).items()]
        self._client.log_batch(self._run, metrics=entities)

    def close(self, outcome: Outcome) -> None:
        """Marks the run as finished, failed or killed."""
        self._client.set_terminated(self._run, status=_MLFLOW_STATES[outcome])


class Wandb:
    """A run on Weights & Biases."""

    def __init__(self, config: WandbTracker, run: str) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=config.project,
            entity=config.entity,
            name=run,
            mode=config.mode,
            dir=str(Path(config.folder).expanduser()) if config.folder else None,
            reinit="create_new",
            # `MachineSampler` samples the machine for all trackers; code is not uploaded.
            settings=wandb.Settings(
                silent=True, save_code=False, disable_git=True, x_disable_stats=True
            ),
        )
        self._stages: set[str] = set()

    def log_metrics(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the step with a step metric per stage, since each stage counts its own steps."""
        group = _group(stage)
        if group not in self._stages:
            self._stages.add(group)
            self._run.define_metric(f"{group}/*", step_metric=f"{group}/step")
        self._run.log({**_tags(stage, metrics), f"{group}/step": step})

    def close(self, outcome: Outcome) -> None:
        """Flushes and finishes the run, as failed unless it has succeeded."""
        self._run.finish(exit_code=int(outcome != "succeeded"))
