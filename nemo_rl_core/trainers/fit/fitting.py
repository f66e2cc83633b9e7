"""`fit`: trains from Python on any model and data, and stores the result.

The model, the data and the run become artifacts in the store, each with its manifest, so a
checkpoint from five lines of Python has the same lineage as one from a pipeline.
"""

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from nemo_rl_core.config.mistakes import describe
from nemo_rl_core.config.tracking import TrackingConfig
from nemo_rl_core.config.trainer import LoopConfig, RolloutSettings, TrainerSettings
from nemo_rl_core.config.warm_up import warm_up_warnings
from nemo_rl_core.environments.contents import reward_content
from nemo_rl_core.environments.interfaces import Scorer
from nemo_rl_core.produce import StageInputs, StageResult
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.object_source import object_source
from nemo_rl_core.telemetry.decks import training_deck
from nemo_rl_core.telemetry.metrics import MetricsFile
from nemo_rl_core.trainers.fit.inputs import fit_call, parents_of, scorer_for
from nemo_rl_core.trainers.fit.recording import UnrecordedStages, recorded_fit
from nemo_rl_core.trainers.fit.request import FitRequest, TrainerForFit, reward_name
from nemo_rl_core.trainers.gpu_load import warn_of_hours
from nemo_rl_core.trainers.loop import STOPPED

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """A finished training.

    Attributes:
        folder: The artifact: model, trainer state, metrics and manifest.
        metrics: Metrics of every step, in order.
        step: Number of the last step.
        num_tokens: Number of tokens trained on.
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
        """Name of the artifact in the store and in lineage."""
        return self.folder.name

    @property
    def manifest(self) -> Manifest:
        """Data, code, config and parents."""
        return Manifest.read(self.folder)

    @property
    def stopped(self) -> str:
        """The reason for which a callback stopped the run; empty for a complete run."""
        return self.manifest.choices.get(STOPPED, "")


def fit(trainer: TrainerForFit, request: FitRequest) -> TrainResult:
    """Stores model and data, trains, and publishes the result."""
    section = getattr(trainer.settings, trainer.algorithm, None)
    for text in warm_up_warnings(trainer.algorithm, section):
        logger.warning("%s", text)
    scorer = scorer_for(trainer.algorithm, trainer.settings, request)
    with recorded_fit(fit_call(trainer, request)) as stages:
        parents = parents_of(stages, trainer.settings, request, scorer)
        if isinstance(section, LoopConfig):
            warn_of_hours(
                trainer.algorithm,
                section,
                trainer.settings,
                parents["base"] / "model",
                parents["train"],
            )
        config = training_config(trainer.settings, request)
        return train_on(trainer, config, parents, scorer, stages, code=code_of(request))


def train_on(
    trainer: TrainerForFit,
    config: Mapping[str, Any],
    parents: Mapping[str, Path],
    scorer: Scorer | None,
    stages: UnrecordedStages,
    *,
    code: frozenset[str] = frozenset(),
) -> TrainResult:
    """Trains on artifacts as one stage.

    Args:
        trainer: The trainer to use.
        config: Config for the manifest, and so for the key; see `training_config`.
        parents: Artifacts by role; see `RunOnArtifacts`.
        scorer: Scorer that replaces the environment of the settings.
        stages: Stages to run this one in.
        code: Modules and files of user code that the training runs.
    """

    def work(folder: Path) -> StageResult:
        result = trainer.run(parents, folder, scorer)
        summary, deck = training_deck(folder)
        return result.made(summary=summary, deck=deck)

    inputs = StageInputs(
        trainer.algorithm, dict(config), dict(parents), source=trainer.source, code=code
    )
    artifact = stages.produce(inputs, work)
    metrics = [line.metrics for line in MetricsFile(artifact / "metrics.jsonl").read()]
    manifest = Manifest.read(artifact)
    return TrainResult(artifact, metrics, manifest.step or 0, manifest.cost.tokens)


def code_of(request: FitRequest) -> frozenset[str]:
    """Returns the modules and files of the reward and of other user code."""
    sources = [object_source(request.reward_fn), *request.sources.values()]
    return frozenset().union(*(each.code for each in sources))


def training_config(settings: TrainerSettings, request: FitRequest) -> dict[str, Any]:
    """Returns the inputs of training besides its artifacts: settings, run name, user code."""
    config = settings.model_dump(mode="json") | {"run": request.name or uuid.uuid4().hex}
    sources = request.sources
    if request.reward is not None:
        config["reward_weights"] = request.reward_weights and [*request.reward_weights]
        config["reward_fn"] = reward_name(request.reward_fn)
        sources["reward_fn"] = object_source(request.reward_fn)
    if isinstance(settings, RolloutSettings):
        config["reward_content"] = reward_content(settings.environment)
    if request.stoppers:
        sources["callbacks"] = object_source(list(request.stoppers))
    for name, source in sources.items():
        config[f"{name}_source"] = source.digest
        if source.unknown and request.name:
            logger.warning(
                "%s refers to values of %s, which cannot be compared with an earlier run's: "
                "the run %r restarts in every process",
                name,
                ", ".join(source.unknown),
                request.name,
            )
    return config


def as_tracking(tracking: TrackingConfig | Mapping[str, Any] | None) -> TrackingConfig:
    """Validates the argument `tracking` of `fit`."""
    values = {
        "tracking": tracking if isinstance(tracking, TrackingConfig) else dict(tracking or {})
    }
    try:
        return TypeAdapter(dict[str, TrackingConfig]).validate_python(values)["tracking"]
    except ValidationError as error:
        raise describe(error, values) from error
