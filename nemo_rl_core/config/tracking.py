"""Trackers that receive the metrics of a run in addition to the history."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat

from nemo_rl_core.config.base import FrozenConfig


class JsonLinesTracker(FrozenConfig):
    """Appends `{"stage": ..., "step": ..., "loss": ...}` to a file, one line per step.

    Attributes:
        path: Path of the file.
    """

    kind: Literal["jsonl"] = "jsonl"
    path: str = Field(min_length=1)


class TensorBoardTracker(FrozenConfig):
    """Event files for TensorBoard, in one folder per run.

    Attributes:
        folder: Parent folder of the folders of runs.
    """

    kind: Literal["tensorboard"] = "tensorboard"
    folder: str = Field(min_length=1)


class MlflowTracker(FrozenConfig):
    """A run on an MLflow server. Other stores need the package `mlflow`, not `mlflow-skinny`.

    Attributes:
        tracking_uri: The server's address; None takes `MLFLOW_TRACKING_URI`.
        experiment: The experiment; it is created if it does not exist.
    """

    secrets_from: ClassVar[str] = (
        "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
    )

    kind: Literal["mlflow"] = "mlflow"
    tracking_uri: str | None = None
    experiment: str = Field(default="nemo-rl-flow", min_length=1)


class WandbTracker(FrozenConfig):
    """A run on Weights & Biases, or with `mode: offline` a folder to sync later.

    The key is never part of a recipe: it comes from `WANDB_API_KEY` or from `wandb login`.

    Attributes:
        project: The project.
        entity: The user or team; None takes the account's default.
        mode: Whether metrics are sent during the run, or kept in a folder.
        folder: Folder for local files; None takes wandb's default.
    """

    kind: Literal["wandb"] = "wandb"
    project: str = Field(default="nemo-rl-flow", min_length=1)
    entity: str | None = None
    mode: Literal["online", "offline"] = "online"
    folder: str | None = None


class OtlpTracker(FrozenConfig):
    """Pushes metrics by OTLP over HTTP: to an OpenTelemetry collector, or to Prometheus itself.

    A pod of a stage does not live long enough to be scraped, so it pushes. Headers, certificates
    and other options of the exporter come from OpenTelemetry's variables, such as
    `OTEL_EXPORTER_OTLP_HEADERS`; a key is never part of a recipe.

    Attributes:
        endpoint: Full address, such as `http://collector:4318/v1/metrics`, or for Prometheus
            `http://prometheus:9090/api/v1/otlp/v1/metrics`; None takes
            `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT` or `OTEL_EXPORTER_OTLP_ENDPOINT`.
        every_seconds: Interval at which the latest values are pushed.
    """

    secrets_from: ClassVar[str] = "set it in OTEL_EXPORTER_OTLP_HEADERS"

    kind: Literal["otlp"] = "otlp"
    endpoint: str | None = Field(default=None, min_length=1)
    every_seconds: PositiveFloat = 15.0


TrackerConfig = Annotated[
    JsonLinesTracker | TensorBoardTracker | MlflowTracker | WandbTracker | OtlpTracker,
    Field(discriminator="kind"),
]


class TrackingConfig(FrozenConfig):
    """Trackers of a run. They do not affect results, so no stage reads them.

    Attributes:
        trackers: Trackers that receive the metrics.
        sample_machine_every_seconds: Interval at which this machine's load is read; None for never.
    """

    # A list, since flytekit does not support tuples in dataclasses and warns at every import.
    trackers: list[TrackerConfig] = Field(default_factory=list)
    sample_machine_every_seconds: PositiveFloat | None = 10.0


class BudgetConfig(FrozenConfig):
    """Budget of a run. It does not affect results, so no stage reads it.

    Attributes:
        max_gpu_hours: GPU-hours after which the running stage saves and the run ends; None for no
            limit. The variable `NEMO_RL_MAX_GPU_HOURS` overrides it.
        mean_completion_tokens: Expected mean length of a completion, for estimating hours; None
            assumes the maximum length.
    """

    max_gpu_hours: PositiveFloat | None = None
    mean_completion_tokens: PositiveFloat | None = None
