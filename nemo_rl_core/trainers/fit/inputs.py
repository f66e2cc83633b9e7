"""Inputs of `fit` as artifacts: the model, the data and the scorer."""

import logging
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from nemo_rl_core.checkpoints.model_code import allow, allow_or_refuse, code_files
from nemo_rl_core.config.functions import FIELDS
from nemo_rl_core.config.model import ModelConfig, PretrainedModel, as_model
from nemo_rl_core.config.trainer import RolloutSettings, TrainerSettings
from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.data.loader import save_frame
from nemo_rl_core.data.module import DataModule
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.data.tables import rows_of_frame
from nemo_rl_core.environments.adapt import as_scorer
from nemo_rl_core.environments.contents import commit_in, located_model, model_content
from nemo_rl_core.environments.interfaces import Scorer
from nemo_rl_core.environments.needs import check_targets, refuse_incomplete_rows
from nemo_rl_core.errors import ConfigError, StoreError
from nemo_rl_core.produce import StageInputs, StageResult
from nemo_rl_core.store.files import hash_file
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.source_digest import source_digest
from nemo_rl_core.store.store import Store
from nemo_rl_core.trainers.custom_functions import is_importable
from nemo_rl_core.trainers.fit.recording import FitCall, UnrecordedStages
from nemo_rl_core.trainers.fit.request import FitRequest, TrainerForFit, reward_name
from nemo_rl_core.types import Prompt

logger = logging.getLogger(__name__)


def fit_call(trainer: TrainerForFit, request: FitRequest) -> FitCall:
    """Describes a call of `fit` for its record."""
    cls = trainer.cls
    section = getattr(trainer.settings, trainer.algorithm, None)
    unrepeatable = [
        f"the {name} is a custom object, {reward_name(part)}, which is not recorded"
        if name not in FIELDS
        else f"the {name}, {reward_name(part)}, is not at the top level of an importable module"
        for name, part in request.parts.items()
        if name not in FIELDS or not is_importable(part, getattr(section, FIELDS[name]).target)
    ]
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        unrepeatable.append(
            f"the trainer {cls.__qualname__} is not at the top level of an importable module"
        )
    inputs: dict[str, Any] = {
        "model": _described(request.model),
        "dataset": _described(request.dataset),
        "settings": trainer.settings.model_dump(mode="json"),
    }
    for name in ("validation", "reference", "reward_weights", "row_format"):
        value = getattr(request, name)
        inputs |= {name: _described(value)} if value else {}
    if request.reward is not None:
        inputs["reward_fn"] = reward_name(request.reward_fn)
    return FitCall(
        f"{cls.__module__}:{cls.__qualname__}",
        inputs,
        name=request.name or "",
        source=trainer.source,
        tracking=request.tracking,
        reward=request.reward,
        unrepeatable=tuple(unrepeatable),
    )


def _described(value: Any) -> Any:
    """Returns a value for the record: names and configs unchanged, rows as their number."""
    if value is None or isinstance(value, BaseModel):
        return value and value.model_dump(mode="json")
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _described(each) for key, each in value.items()}
    count = f"{len(value)} rows in a " if hasattr(value, "__len__") else ""
    is_short = isinstance(value, list | tuple) and all(isinstance(n, int | float) for n in value)
    return [*value] if is_short else f"{count}{type(value).__name__}"


def parents_of(
    stages: UnrecordedStages,
    settings: TrainerSettings,
    request: FitRequest,
    scorer: Scorer | None,
) -> dict[str, Path]:
    """Returns the artifacts that training reads, by role; creates missing ones."""
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
        rows = request.dataset if part == "train" else request.validation
        recorded_config = {"read_as": data.read_as, "data": {"rows": _described(rows)}}
        parents[part] = _data_artifact(stages, part, frame, parents["base"], recorded_config)
    return parents


def scorer_for(algorithm: str, settings: TrainerSettings, request: FitRequest) -> Scorer | None:
    """Returns the scorer that replaces the settings' environment; None without one."""
    if request.reward_fn is None and request.reward_weights is None:
        if isinstance(settings, RolloutSettings):
            check_targets(settings.local_environment)
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
    """Refuses rows that cannot be scored before the model is loaded."""
    if not isinstance(settings, RolloutSettings) or data.kind != "prompts":
        return
    for name, frame in (("train", data.train), ("validation", data.validation)):
        prompts = (
            Prompt(row["id"], row["prompt"], (), row["answer"], row["task"], row["metadata"])
            for row in rows_of_frame(frame)
        )
        refuse_incomplete_rows(prompts, scorer or settings.local_environment, name=name)


def _model_artifact(stages: UnrecordedStages, model: str | Path | ModelConfig, seed: int) -> Path:
    model = as_model(model)
    model_config = PretrainedModel(name=str(model)) if isinstance(model, str | Path) else model
    config = located_model(model_config)
    settings: dict[str, Any] = {"model": config.model_dump(mode="json"), "seed": seed}
    folder = Path(config.name).expanduser()
    if isinstance(config, PretrainedModel) and folder.is_dir():
        allow_or_refuse(folder, trust=config.trust_remote_code, name=config.name)
        trained = _checkpoint_in_store(folder)
        # Without the option, a copy without the code is made.
        if trained is not None and (config.trust_remote_code or not code_files(folder)):
            return trained
    content = model_content(config)
    if content:
        settings["content"] = content

    def work(target: Path) -> StageResult:
        count = materialize(config, target / "model", seed=seed, commit=commit_in(content))
        return StageResult("checkpoint", "hf", f"{config.name}, {count / 1e6:.2f} M parameters")

    source = source_digest(materialize.__module__)
    made = stages.produce(StageInputs("prepare_model", settings, source=source), work)
    allow(Manifest.read(made).model_code, called=config.name)
    return made


def _checkpoint_in_store(folder: Path) -> Path | None:
    """Returns the checkpoint of this store that the model folder belongs to, for its lineage."""
    artifact = folder.resolve().parent
    if folder.name != "model" or artifact.parent != Store.default().artifacts:
        return None
    try:
        manifest = Manifest.read(artifact)
    except StoreError:
        return None
    return artifact if (manifest.kind, manifest.format) == ("checkpoint", "hf") else None


def _data_artifact(
    stages: UnrecordedStages, name: str, frame: Any, base: Path, recorded_config: Mapping[str, Any]
) -> Path:
    with tempfile.TemporaryDirectory() as scratch:
        written = save_frame(frame, Path(scratch))

        def work(folder: Path) -> StageResult:
            shutil.copyfile(written, folder / written.name)
            return StageResult("dataset", "parquet", f"{name} {len(frame)} rows")

        config = {"content": hash_file(written), **recorded_config}
        source = source_digest(DataModule.__module__)
        inputs = StageInputs("prepare_data", config, {"tokenizer": base}, source, part=name)
        return stages.produce(inputs, work)
