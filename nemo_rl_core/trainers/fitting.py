"""From what a user has at hand to the folders that a trainer runs on.

The model, the data and the run become artifacts in the store, each with its manifest: a checkpoint
made by five lines of Python has the same lineage as one made by a pipeline.
"""

import logging
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl_core.config.model import ModelConfig, PretrainedModel
from nemo_rl_core.config.trainer import RolloutSettings, TrainerSettings
from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.data.loader import save_frame
from nemo_rl_core.data.module import DataModule
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.data.tables import rows_of_frame
from nemo_rl_core.environments.adapt import as_scorer
from nemo_rl_core.environments.interfaces import Scorer
from nemo_rl_core.environments.needs import check_targets, refuse_incomplete_rows
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.produce import StageInputs, StageResult, produce
from nemo_rl_core.store.files import hash_file, hash_folder
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.telemetry.metrics import MetricsFile
from nemo_rl_core.trainers.loop import RunResult
from nemo_rl_core.types import Prompt

logger = logging.getLogger(__name__)

RunOnArtifacts = Callable[[Mapping[str, Path], Path, Scorer | None], RunResult]
"""A trainer's run: of artifacts by role, in a work folder, with a scorer in place of the settings'.

Roles are `base`, `train`, `validation`, and `reference` where one was given."""


@dataclass(frozen=True)
class TrainResult:
    """A finished training.

    Attributes:
        folder: The artifact: model, trainer state, metrics and manifest.
        metrics: The figures of every step, in order.
        step: Number of the last step.
        num_tokens: Tokens trained on.
    """

    folder: Path
    metrics: list[dict[str, float]]
    step: int
    num_tokens: int

    @property
    def checkpoint(self) -> Path:
        """Weights, config and tokenizer in the transformers layout."""
        return self.folder / "model"

    @property
    def lineage_id(self) -> str:
        """What the artifact is called in the store and in lineage."""
        return self.folder.name

    @property
    def manifest(self) -> Manifest:
        """Data, code, config and parents."""
        return Manifest.read(self.folder)


@dataclass(frozen=True)
class FitRequest:
    """What `fit` was asked for.

    Attributes:
        model: A hub name, a folder, or the config of a model.
        dataset: Whatever `DataModule.of` reads.
        validation: The same, for rows that are never trained on.
        reward_fn: Whatever `as_scorer` takes, or None for the environment of the settings.
        reference: Hub name or folder of the reference or teacher; None takes `model`.
        row_format: How the columns of both are read, as `DataModule.of` takes it.
        name: Of the run. An interrupted run of the same name and inputs is continued, a finished
            one is given back; without a name, every call trains anew. A function cannot be compared
            with another, so `reward_fn` is none of these inputs: a new reward needs a new name.
        reward_weights: Of the functions of a list.
    """

    model: str | Path | ModelConfig
    dataset: Any
    validation: Any = None
    reward_fn: Any = None
    reference: str | Path | ModelConfig | None = None
    name: str | None = None
    reward_weights: Sequence[float] | None = None
    row_format: Mapping[str, Any] = field(default_factory=dict)


def fit(
    algorithm: str, settings: TrainerSettings, request: FitRequest, run: RunOnArtifacts
) -> TrainResult:
    """Brings model and data into the store, trains, and publishes the result.

    Args:
        algorithm: Its name, which is the stage's too.
        settings: Of the trainer.
        request: What to train, and on what.
        run: Trains.

    Raises:
        NemoRLError: For a model, data or a reward that cannot be used, before a worker starts.
    """
    scorer = _scorer(algorithm, settings, request)
    seed = settings.seed
    parents = {"base": _model_artifact(request.model, seed)}
    if request.reference is not None:
        parents["reference"] = _model_artifact(request.reference, seed)
    data = DataModule.of(
        request.dataset,
        validation=request.validation,
        tokenizer=load_tokenizer(parents["base"] / "model"),
        max_prompt_tokens=(
            settings.max_prompt_tokens if isinstance(settings, RolloutSettings) else None
        ),
        seed=seed,
        **request.row_format,
    )
    _refuse_incomplete_rows(data, settings, scorer)
    for part, frame in (("train", data.train), ("validation", data.validation)):
        parents[part] = _data_artifact(part, frame, parents["base"], read_as=data.read_as)

    def work(folder: Path) -> StageResult:
        return run(parents, folder, scorer).made()

    name = request.name or uuid.uuid4().hex
    inputs = StageInputs(algorithm, settings.model_dump(mode="json") | {"run": name}, parents)
    return _result(produce(inputs, work))


def _scorer(algorithm: str, settings: TrainerSettings, request: FitRequest) -> Scorer | None:
    if request.reward_fn is None and request.reward_weights is None:
        if isinstance(settings, RolloutSettings):
            check_targets(settings.environment)
            logger.warning(
                "no reward_fn: the environment %r of the settings scores",
                settings.environment.kind,
            )
        return None
    if not isinstance(settings, RolloutSettings):
        raise ConfigError(
            f"the algorithm {algorithm!r} scores no completions, so it takes no reward_fn",
            fix="leave reward_fn out, or choose an algorithm that samples, such as 'grpo'",
        )
    return as_scorer(request.reward_fn, request.reward_weights)


def _refuse_incomplete_rows(
    data: DataModule, settings: TrainerSettings, scorer: Scorer | None
) -> None:
    """Rows that cannot be scored are refused before the model is loaded."""
    if not isinstance(settings, RolloutSettings) or data.kind != "prompts":
        return
    for name, frame in (("train", data.train), ("validation", data.validation)):
        prompts = (
            Prompt(row["id"], row["prompt"], (), row["answer"], row["task"], row["metadata"])
            for row in rows_of_frame(frame)
        )
        refuse_incomplete_rows(prompts, scorer or settings.environment, name=name)


def _result(artifact: Path) -> TrainResult:
    lines = MetricsFile(artifact / "metrics.jsonl").read()
    manifest = Manifest.read(artifact)
    metrics = [line.metrics for line in lines]
    return TrainResult(artifact, metrics, manifest.step or 0, manifest.cost.tokens)


def _model_artifact(model: str | Path | ModelConfig, seed: int) -> Path:
    config = PretrainedModel(name=str(model)) if isinstance(model, str | Path) else model
    settings: dict[str, Any] = {"model": config.model_dump(mode="json"), "seed": seed}
    folder = Path(config.name).expanduser()
    if config.kind == "pretrained" and folder.is_dir():
        settings["content"] = hash_folder(folder)

    def work(target: Path) -> StageResult:
        count = materialize(config, target / "model", seed=seed)
        return StageResult("checkpoint", "hf", f"{config.name}, {count / 1e6:.2f} M parameters")

    return produce(StageInputs("prepare_model", settings), work)


def _data_artifact(name: str, frame: Any, base: Path, *, read_as: str) -> Path:
    with tempfile.TemporaryDirectory() as scratch:
        written = save_frame(frame, Path(scratch))

        def work(folder: Path) -> StageResult:
            shutil.copyfile(written, folder / written.name)
            return StageResult("dataset", "parquet", f"{name} {len(frame)} rows")

        settings = {"content": hash_file(written), "read_as": read_as}
        inputs = StageInputs("prepare_data", settings, {"tokenizer": base}, part=name)
        return produce(inputs, work)
