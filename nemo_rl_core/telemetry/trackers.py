"""The trackers; each imports its library when it is opened, since few runs use any."""

import json
import re
import time
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

_REQUEST_SECONDS = 5
"""Timeout of one push with retries: half of the time that a run waits for its trackers."""
_NO_LETTER = re.compile(r"[^a-zA-Z0-9_]+")


class Otlp:
    """Gauges of which a thread of OpenTelemetry's SDK pushes the latest value per interval.

    Every metric is a gauge `nemo_rl_NAME` with the labels `run`, `stage`, and others of the run.
    `nemo_rl_step` and `nemo_rl_last_step_time_seconds` of each stage are for alerts when a run
    makes no progress. At the end there are `nemo_rl_stage_end_time_seconds` and
    `nemo_rl_run_end_time_seconds`, with the label `outcome`.

    Args:
        labels: Further labels of all metrics; empty ones are left out.
        part: The part that `close` ends; for a stage, the end of the run is not pushed.
    """

    def __init__(
        self, config: OtlpTracker, run: str, labels: Mapping[str, str], *, part: Part = "run"
    ) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

        exporter = OTLPMetricExporter(endpoint=config.endpoint, timeout=_REQUEST_SECONDS)
        reader = PeriodicExportingMetricReader(exporter, 1000 * config.every_seconds)
        # `OTEL_RESOURCE_ATTRIBUTES` of the environment is merged in.
        resource = Resource.create({"service.name": "nemo-rl", "service.instance.id": run})
        self._provider = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        self._meter = self._provider.get_meter("nemo_rl")
        self._part, self._stages = part, set[str]()
        self._labels = {"run": run, **{name: value for name, value in labels.items() if value}}

    def log_metrics(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Sets the metrics of a step for the next push."""
        self._stages.add(stage)
        labels = {**self._labels, "stage": stage}
        for name, value in metrics.items():
            self._set(name, value, labels)
        self._set("step", step, labels)
        self._set("last_step_time_seconds", time.time(), labels)

    def close(self, outcome: Outcome) -> None:
        """Pushes the last metrics and the end times of the stages and the run."""
        labels, now = {**self._labels, "outcome": outcome}, time.time()
        for stage in self._stages:
            self._set("stage_end_time_seconds", now, {**labels, "stage": stage})
        if self._part == "run":
            self._set("run_end_time_seconds", now, labels)
        self._provider.shutdown(timeout_millis=1000 * _REQUEST_SECONDS)

    def _set(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        # The meter returns the same instrument for the same name.
        self._meter.create_gauge(metric_name(name)).set(value, labels)


def metric_name(name: str) -> str:
    """Returns the name of a metric in Prometheus.

    Example:
        >>> metric_name("gpu0_percent"), metric_name("by tag/math: share")
        ('nemo_rl_gpu0_percent', 'nemo_rl_by_tag_math_share')
    """
    return f"nemo_rl_{_NO_LETTER.sub('_', name).strip('_')}"


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
    part: Part = "run",
) -> Tracker:
    """Opens a tracker of a run, or of a stage that ends with it."""
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
            return Otlp(config, run, labels, part=part)


def _group(stage: str) -> str:
    """Returns a stage's name in characters that every service accepts in metric names.

    Example:
        >>> _group("grpo_iteration 1 (seed 0, learning_rate 0.0002)")
        'grpo_iteration 1 - seed 0 - learning_rate 0.0002'
    """
    return re.sub(r"\s*[^\w\s.:-]+\s*", " - ", stage).strip(" -")


def _tags(stage: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{_group(stage)}/{name}": value for name, value in metrics.items()}


class JsonLines:
    """Appends one JSON object per step to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path.expanduser()

    def log_metrics(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Adds one line."""
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
        existing = self._client.get_experiment_by_name(config.experiment)
        experiment = (
            existing.experiment_id
            if existing
            else self._client.create_experiment(config.experiment)
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
