"""What stages hand on: a folder with a manifest, known by its content.

Use the annotated names (`Dataset`, `Checkpoint`, ...) in signatures: they make Flyte's cache
compare content hashes, not paths.
"""

from pathlib import Path
from typing import Annotated

from flytekit import HashMethod
from flytekit.types.directory import FlyteDirectory
from pydantic import BaseModel, ConfigDict

from nemo_rl_core.checkpoints.state_file import STATE_FILE, saved_by
from nemo_rl_core.store.manifest import Manifest
from tasks.platform.downloads import fetch, fetch_whole


class Artifact(BaseModel):
    """A folder and what it is.

    Attributes:
        directory: The files, `manifest.json` among them.
        stage: What made it, with the iteration where the stage has such.
        content_hash: Of the files that say something; times and versions do not count.
        step: The training step it belongs to; 0 before any.
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
        """The files on this machine, all of them downloaded where they lie elsewhere."""
        return fetch_whole(self.directory)

    @property
    def records(self) -> Path:
        """The same folder, where only the files at its top need be: manifest, metrics, rows."""
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
        row_kind: The kind of rows that `prepare_data` has read, by `data/row_kinds.py`.
    """

    row_kind: str = ""


class LogprobArtifact(Artifact):
    """Logprobs of a data set's trained tokens under one model, as `rows.parquet`."""


class CheckpointArtifact(Artifact):
    """`model/` in the transformers layout; `trainer/` where training can go on from it."""

    @property
    def model_folder(self) -> Path:
        """Weights, config and tokenizer; nothing else of the checkpoint is downloaded."""
        return fetch(self.directory, "model") / "model"

    @property
    def backend(self) -> str | None:
        """What wrote `trainer/`; None where there is nothing to go on from."""
        return saved_by(fetch(self.directory, STATE_FILE))


class EvalReport(Artifact):
    """`rows.parquet` with every completion, and the figures.

    Attributes:
        metrics: `mean_reward`, and `greedy_accuracy`, `pass_at_k` and `cons_at_k`, each with its
            interval.
        measured: The stage whose checkpoint this is about, or the name of a given model.
    """

    metrics: dict[str, float]
    measured: str


class PromotionDecision(Artifact):
    """Whether the candidate takes the incumbent's place, and the figures behind it.

    Attributes:
        promoted: The candidate is better at the stated confidence.
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
        metrics: The figures of `nemo_rl_core.evals.comparison.Comparison`.
    """

    metrics: dict[str, float]


class PointReport(Artifact):
    """`point.json`: a point of a sweep, run and measured.

    Attributes:
        metrics: As of its `EvalReport`.
        steps: The numbers of its steps.
        rewards: The mean reward of each.
    """

    metrics: dict[str, float]
    steps: list[int]
    rewards: list[float]


class SweepReport(Artifact):
    """`sweep.json`: the fields of `nemo_rl_core.evals.sweep.SweepResult`."""


class LineageReport(Artifact):
    """`lineage.json`, and `deck.html` to look at: a checkpoint and all it came from."""


def content_hash(artifact: Artifact) -> str:
    """What Flyte's cache compares."""
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
