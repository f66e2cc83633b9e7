"""Where the metrics of a run go besides its own record."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from nemo_rl_core.config.base import FrozenConfig


class JsonLinesTracker(FrozenConfig):
    """Appends `{"stage": ..., "step": ..., "loss": ...}` to a file, a line a step.

    Attributes:
        path: The file; lines are appended.
    """

    kind: Literal["jsonl"] = "jsonl"
    path: str = Field(min_length=1)


class TensorBoardTracker(FrozenConfig):
    """Event files for TensorBoard, in a folder a run below `folder`.

    Attributes:
        folder: The folder that holds a folder a run.
    """

    kind: Literal["tensorboard"] = "tensorboard"
    folder: str = Field(min_length=1)


class MlflowTracker(FrozenConfig):
    """A run on an MLflow server. Other stores need the package `mlflow`, not `mlflow-skinny`.

    Attributes:
        tracking_uri: The server's address; None takes `MLFLOW_TRACKING_URI`.
        experiment: The experiment; it is created where it does not exist.
    """

    kind: Literal["mlflow"] = "mlflow"
    tracking_uri: str | None = None
    experiment: str = Field(default="nemo-rl-flow", min_length=1)


class WandbTracker(FrozenConfig):
    """A run on Weights & Biases, or with `mode: offline` a folder to sync later.

    The key is never part of a recipe: it comes from `WANDB_API_KEY` or from `wandb login`.

    Attributes:
        project: The project.
        entity: The user or team; None takes the account's default.
        mode: Whether metrics are sent while the run goes on, or kept in a folder.
        folder: Where local files are written; None takes wandb's default.
    """

    kind: Literal["wandb"] = "wandb"
    project: str = Field(default="nemo-rl-flow", min_length=1)
    entity: str | None = None
    mode: Literal["online", "offline"] = "online"
    folder: str | None = None


class OtlpTracker(FrozenConfig):
    """Pushes metrics by OTLP over HTTP: to an OpenTelemetry collector, or to Prometheus itself.

    A pod of a stage does not live long enough to be scraped, so it pushes. Headers, certificates
    and whatever else the exporter needs come from the variables of OpenTelemetry, such as
    `OTEL_EXPORTER_OTLP_HEADERS`; a key is never part of a recipe.

    Attributes:
        endpoint: The whole address, such as `http://collector:4318/v1/metrics`, or of Prometheus
            `http://prometheus:9090/api/v1/otlp/v1/metrics`; None takes
            `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT` or `OTEL_EXPORTER_OTLP_ENDPOINT`.
        every_seconds: How often the latest figures are pushed.
    """

    kind: Literal["otlp"] = "otlp"
    endpoint: str | None = Field(default=None, min_length=1)
    every_seconds: PositiveFloat = 15.0


TrackerConfig = Annotated[
    JsonLinesTracker | TensorBoardTracker | MlflowTracker | WandbTracker | OtlpTracker,
    Field(discriminator="kind"),
]


class TrackingConfig(FrozenConfig):
    """What is told of a run to whom; it changes no result, and so no stage reads it.

    Attributes:
        trackers: Several may be told at once.
        sample_machine_every_seconds: How often this machine's load is read; None for never.
    """

    # A list, since flytekit knows no tuples in records, and says so at every import.
    trackers: list[TrackerConfig] = Field(default_factory=list)
    sample_machine_every_seconds: PositiveFloat | None = 10.0
