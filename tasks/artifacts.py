"""Artifacts that stages exchange: folders with a manifest, identified by their content.

Use the annotated names (`Dataset`, `Checkpoint`, ...) in signatures: they make Flyte's cache
compare content hashes instead of paths.
"""

from pathlib import Path
from typing import Annotated

from flytekit import HashMethod
from flytekit.types.directory import FlyteDirectory
from pydantic import BaseModel, ConfigDict

from nemo_rl_core.checkpoints.state_file import STATE_FILE, saved_by
from nemo_rl_core.store.manifest import Manifest
from tasks.flyte.downloads import fetch, fetch_whole


class Artifact(BaseModel):
    """A folder with a description of its content.

    Attributes:
        directory: The files, including `manifest.json`.
        stage: Stage that made it, with the iteration if the stage has one.
        content_hash: Hash of the files that matter; times and versions are ignored.
        step: Training step of the artifact; 0 before the first.
        summary: One line for the table at the end of a run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    directory: FlyteDirectory
    stage: str
    content_hash: str
    step: int = 0
    summary: str = ""

    @property
    def folder(self) -> Path:
        """Folder on this machine; remote files are downloaded in full."""
        return fetch_whole(self.directory)

    @property
    def records(self) -> Path:
        """The same folder, with at least its top-level files: manifest, metrics, rows."""
        return fetch(self.directory)

    @property
    def manifest(self) -> Manifest:
        """Origin and cost."""
        return Manifest.read(self.records)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.content_hash[:12]} in {self.directory.path})"

    __str__ = __repr__


class TokenizerArtifact(Artifact):
    """A tokenizer in the transformers layout."""


class DatasetArtifact(Artifact):
    """Checked rows as `rows.parquet`.

    Attributes:
        row_kind: Kind of the rows that `prepare_data` has read; see `data/row_kinds.py`.
    """

    row_kind: str = ""


class LogprobArtifact(Artifact):
    """Logprobs of a data set's trained tokens under one model, as `rows.parquet`."""


class CheckpointArtifact(Artifact):
    """`model/` in the transformers layout; `trainer/` if training can resume from it."""

    @property
    def model_folder(self) -> Path:
        """Folder with weights, config and tokenizer; nothing else is downloaded."""
        return fetch(self.directory, "model") / "model"

    @property
    def backend(self) -> str | None:
        """Backend that wrote `trainer/`; None without a state to resume from."""
        return saved_by(fetch(self.directory, STATE_FILE))


class EvalReport(Artifact):
    """`rows.parquet` with every completion, and the metrics.

    Attributes:
        metrics: `mean_reward`, and `greedy_accuracy`, `pass_at_k` and `cons_at_k`, each with its
            interval.
        measured: The stage whose checkpoint was evaluated, or the name of a given model.
    """

    metrics: dict[str, float]
    measured: str


class PromotionDecision(Artifact):
    """Whether the candidate replaces the incumbent, and the numbers behind the decision.

    Attributes:
        promoted: Whether the candidate is better at the stated confidence.
        difference: Greedy accuracy of the candidate less the incumbent's, on the same prompts.
        low: Lower bound of the paired interval of the difference.
        high: Upper bound.
    """

    promoted: bool
    difference: float
    low: float
    high: float


class CompareReport(Artifact):
    """`comparison.json`: two evaluations on the same prompts.

    Attributes:
        metrics: The metrics of `nemo_rl_core.evals.comparison.Comparison`.
    """

    metrics: dict[str, float]


class PointReport(Artifact):
    """`point.json`: the results of one point of a sweep.

    Attributes:
        metrics: Metrics of the point's `EvalReport`.
        steps: Step numbers of the curve of rewards.
        rewards: Mean reward of each of these steps.
    """

    metrics: dict[str, float]
    steps: list[int]
    rewards: list[float]


class SweepReport(Artifact):
    """`sweep.json`: the fields of `nemo_rl_core.evals.sweep.SweepResult`."""


class LineageReport(Artifact):
    """`lineage.json`, and `deck.html` for reading: a checkpoint and its ancestry."""


def content_hash(artifact: Artifact) -> str:
    """Returns the hash that Flyte's cache compares."""
    return artifact.content_hash


_by_content = HashMethod(content_hash)
Tokenizer = Annotated[TokenizerArtifact, _by_content]
Dataset = Annotated[DatasetArtifact, _by_content]
Logprobs = Annotated[LogprobArtifact, _by_content]
Checkpoint = Annotated[CheckpointArtifact, _by_content]
Evaluation = Annotated[EvalReport, _by_content]
Comparison = Annotated[CompareReport, _by_content]
Promotion = Annotated[PromotionDecision, _by_content]
Report = Annotated[PointReport, _by_content]
Summary = Annotated[SweepReport, _by_content]
Lineage = Annotated[LineageReport, _by_content]
