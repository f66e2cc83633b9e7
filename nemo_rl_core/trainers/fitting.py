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

from pydantic import BaseModel, TypeAdapter, ValidationError

from nemo_rl_core.config.base import describe
from nemo_rl_core.config.model import ModelConfig, PretrainedModel, as_model
from nemo_rl_core.config.tracking import TrackingConfig
from nemo_rl_core.config.trainer import RolloutSettings, TrainerSettings
from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.data.loader import save_frame
from nemo_rl_core.data.module import DataModule
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.data.tables import rows_of_frame
from nemo_rl_core.environments.adapt import as_scorer
from nemo_rl_core.environments.contents import reward_content
from nemo_rl_core.environments.interfaces import Scorer
from nemo_rl_core.environments.needs import check_targets, refuse_incomplete_rows
from nemo_rl_core.errors import ConfigError, StoreError
from nemo_rl_core.produce import StageInputs, StageResult
from nemo_rl_core.store.files import hash_file, hash_folder
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.object_source import object_source
from nemo_rl_core.store.source_digest import source_digest
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.decks import training_deck
from nemo_rl_core.telemetry.metrics import MetricsFile
from nemo_rl_core.trainers.loop import RunResult
from nemo_rl_core.trainers.recording import FitCall, UnrecordedStages, recorded_fit
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
            one is given back; without a name, every call trains anew. The source of `reward_fn` and
            of other objects of the user's is one of the inputs (`object_source`).
        reward_weights: Of the functions of a list.
        tracking: Where metrics go besides the run's record.
        parts: Objects of the user's that train or sample, by what they stand for.
    """

    model: str | Path | ModelConfig
    dataset: Any
    validation: Any = None
    reward_fn: Any = None
    reference: str | Path | ModelConfig | None = None
    name: str | None = None
    reward_weights: Sequence[float] | None = None
    row_format: Mapping[str, Any] = field(default_factory=dict)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    parts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reward(self) -> tuple[Any, Any] | None:
        """The reward with its weights; None for the environment of the settings."""
        given = (self.reward_fn, self.reward_weights)
        return None if given == (None, None) else given


@dataclass(frozen=True)
class FittedTrainer:
    """The trainer that `fit` trains with.

    Attributes:
        algorithm: Its name, which is the stage's too.
        cls: Its class.
        settings: Its settings.
        run: Trains.
    """

    algorithm: str
    cls: type
    settings: TrainerSettings
    run: RunOnArtifacts

    @property
    def source(self) -> str:
        """Digest of the source that the training runs."""
        return source_digest(self.cls.__module__)


def fit(trainer: FittedTrainer, request: FitRequest) -> TrainResult:
    """Brings model and data into the store, trains, and publishes the result.

    Args:
        trainer: What trains.
        request: What to train, and on what.

    Raises:
        NemoRLError: For a model, data or a reward that cannot be used, before a worker starts.
    """
    scorer = _scorer(trainer.algorithm, trainer.settings, request)
    with recorded_fit(_call(trainer, request)) as stages:
        parents = _parents(stages, trainer.settings, request, scorer)
        config = training_config(trainer.settings, request)
        return train_on(trainer, config, parents, scorer, stages)


def train_on(
    trainer: FittedTrainer,
    config: Mapping[str, Any],
    parents: Mapping[str, Path],
    scorer: Scorer | None,
    stages: UnrecordedStages,
) -> TrainResult:
    """Trains on artifacts, as one stage.

    Args:
        trainer: What trains.
        config: Of the manifest, and so of the key; see `training_config`.
        parents: Artifacts by role; see `RunOnArtifacts`.
        scorer: In place of the environment of the settings.
        stages: Runs the stage.
    """

    def work(folder: Path) -> StageResult:
        result = trainer.run(parents, folder, scorer)
        summary, deck = training_deck(folder)
        return result.made(summary=summary, deck=deck)

    inputs = StageInputs(trainer.algorithm, dict(config), dict(parents), source=trainer.source)
    return _result(stages.produce(inputs, work))


def training_config(settings: TrainerSettings, request: FitRequest) -> dict[str, Any]:
    """What a training's result depends on beside its artifacts: settings, run, the user's code."""
    config = settings.model_dump(mode="json") | {"run": request.name or uuid.uuid4().hex}
    sources = {name: type(part) for name, part in request.parts.items()}
    if request.reward is not None:
        config["reward_weights"] = request.reward_weights and [*request.reward_weights]
        config["reward_fn"] = reward_name(request.reward_fn)
        sources["reward_fn"] = request.reward_fn
    if isinstance(settings, RolloutSettings):
        config["reward_content"] = reward_content(settings.environment)
    for name, value in sources.items():
        source = object_source(value)
        config[f"{name}_source"] = source.digest
        if source.unknown and request.name:
            logger.warning(
                "%s refers to values of %s, which cannot be compared with an earlier run's: "
                "the run %r begins anew in every process",
                name,
                ", ".join(source.unknown),
                request.name,
            )
    return config


def as_tracking(given: TrackingConfig | Mapping[str, Any] | None) -> TrackingConfig:
    """The section `tracking`, from what `fit` was given.

    Raises:
        ConfigError: If it is none.
    """
    values = {"tracking": given if isinstance(given, TrackingConfig) else dict(given or {})}
    try:
        return TypeAdapter(dict[str, TrackingConfig]).validate_python(values)["tracking"]
    except ValidationError as error:
        raise describe(error, values) from error


def reward_name(reward: Any) -> str:
    """What a reward is called in records: a function's name, an object's class."""
    if isinstance(reward, list | tuple):
        return ", ".join(reward_name(each) for each in reward)
    return str(getattr(reward, "__qualname__", type(reward).__qualname__))


def _call(trainer: FittedTrainer, request: FitRequest) -> FitCall:
    cls = trainer.cls
    unrepeatable = [
        f"the {name} is an object of yours, {type(part).__name__}, which no record holds"
        for name, part in request.parts.items()
    ]
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        unrepeatable.append(f"the trainer {cls.__qualname__} stands in no module")
    given: dict[str, Any] = {
        "model": _described(request.model),
        "dataset": _described(request.dataset),
        "settings": trainer.settings.model_dump(mode="json"),
    }
    for name in ("validation", "reference", "reward_weights", "row_format"):
        value = getattr(request, name)
        given |= {name: _described(value)} if value else {}
    if request.reward is not None:
        given["reward_fn"] = reward_name(request.reward_fn)
    return FitCall(
        f"{cls.__module__}:{cls.__qualname__}",
        given,
        name=request.name or "",
        source=trainer.source,
        tracking=request.tracking,
        reward=request.reward,
        unrepeatable=tuple(unrepeatable),
    )


def _described(value: Any) -> Any:
    """A value for the record: names and configs as they are, rows by their number."""
    if value is None or isinstance(value, BaseModel):
        return value and value.model_dump(mode="json")
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _described(each) for key, each in value.items()}
    count = f"{len(value)} rows in a " if hasattr(value, "__len__") else ""
    is_short = isinstance(value, list | tuple) and all(isinstance(n, int | float) for n in value)
    return [*value] if is_short else f"{count}{type(value).__name__}"


def _parents(
    stages: UnrecordedStages,
    settings: TrainerSettings,
    request: FitRequest,
    scorer: Scorer | None,
) -> dict[str, Path]:
    seed = settings.seed
    parents = {"base": _model_artifact(stages, request.model, seed)}
    if request.reference is not None:
        parents["reference"] = _model_artifact(stages, request.reference, seed)
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
        given = request.dataset if part == "train" else request.validation
        about = {"read_as": data.read_as, "data": {"rows": _described(given)}}
        parents[part] = _data_artifact(stages, part, frame, parents["base"], about)
    return parents


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


def _model_artifact(stages: UnrecordedStages, model: str | Path | ModelConfig, seed: int) -> Path:
    model = as_model(model)
    config = PretrainedModel(name=str(model)) if isinstance(model, str | Path) else model
    settings: dict[str, Any] = {"model": config.model_dump(mode="json"), "seed": seed}
    folder = Path(config.name).expanduser()
    trained = _trained_here(folder) if config.kind == "pretrained" else None
    if trained is not None:
        return trained
    if config.kind == "pretrained" and folder.is_dir():
        settings["content"] = hash_folder(folder)

    def work(target: Path) -> StageResult:
        count = materialize(config, target / "model", seed=seed)
        return StageResult("checkpoint", "hf", f"{config.name}, {count / 1e6:.2f} M parameters")

    source = source_digest(materialize.__module__)
    return stages.produce(StageInputs("prepare_model", settings, source=source), work)


def _trained_here(folder: Path) -> Path | None:
    """The checkpoint of this store whose model lies in the folder: its lineage goes on."""
    artifact = folder.resolve().parent
    if folder.name != "model" or artifact.parent != Store.default().artifacts:
        return None
    try:
        manifest = Manifest.read(artifact)
    except StoreError:
        return None
    return artifact if (manifest.kind, manifest.format) == ("checkpoint", "hf") else None


def _data_artifact(
    stages: UnrecordedStages, name: str, frame: Any, base: Path, about: Mapping[str, Any]
) -> Path:
    with tempfile.TemporaryDirectory() as scratch:
        written = save_frame(frame, Path(scratch))

        def work(folder: Path) -> StageResult:
            shutil.copyfile(written, folder / written.name)
            return StageResult("dataset", "parquet", f"{name} {len(frame)} rows")

        config = {"content": hash_file(written), **about}
        source = source_digest(DataModule.__module__)
        inputs = StageInputs("prepare_data", config, {"tokenizer": base}, source, part=name)
        return stages.produce(inputs, work)
