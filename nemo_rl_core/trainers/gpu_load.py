"""GPU load of a trainer, used to choose settings of `training` that are `auto`."""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_rl_core.config.environment import dedicated_bundles_of_scorers
from nemo_rl_core.config.trainer import LoopConfig, RolloutSettings, TrainerSettings
from nemo_rl_core.config.training import open_choices
from nemo_rl_core.data.loader import load_records
from nemo_rl_core.errors import NemoRLError
from nemo_rl_core.planning.cpu_hours import hours_warning
from nemo_rl_core.planning.load import ScorerLoad, StageLoad
from nemo_rl_core.planning.scorers import scorers_of
from nemo_rl_core.planning.sizes import ModelSizes, sizes_of
from nemo_rl_core.planning.stages import Rollouts, StageSetup, training_stage
from nemo_rl_core.trainers.loop import RunSpec
from nemo_rl_core.trainers.sections import steps_of

_LOG = logging.getLogger(__name__)
_ROWS_READ = 100
_TEXTS = ("prompt", "completion", "messages", "text", "chosen", "rejected")


def load_of_trainer(
    algorithm: str, config: LoopConfig, settings: TrainerSettings, spec: RunSpec
) -> StageLoad | None:
    """Returns the load of a run, the same as `nemo-rl plan` computes for the stage.

    None if no GPU is used, no setting is `auto`, or a model's size is unknown. The models of `spec`
    are on this machine.
    """
    if not settings.cluster.num_gpus or not open_choices(settings.training):
        return None
    try:
        load = _stage(algorithm, config, settings, spec.start, spec.reference)
        return _with_scorers(load, settings, spec)
    except NemoRLError as error:
        _LOG.warning("memory was not planned: %s", error.in_one_line)
        return None


def warn_of_hours(
    algorithm: str, config: LoopConfig, settings: TrainerSettings, start: Path, train: Path
) -> None:
    """Logs that a training may take hours on the CPU cores of this machine.

    `start` is the transformers folder of the first weights. Rows of the data set folder `train` are
    taken at the mean length of the first ones.
    """
    if settings.cluster.num_gpus:
        return
    rows = load_records(train)[:_ROWS_READ]
    texts = [str(row[name]) for row in rows for name in _TEXTS if name in row]
    row_characters = sum(map(len, texts)) / max(len(rows), 1)
    try:
        load, steps = _stage(algorithm, config, settings, start, start), steps_of(config, 1)
    except NemoRLError as error:
        _LOG.debug("the time was not estimated: %s", error.in_one_line)
        return
    text = hours_warning(load, steps.last - steps.first + 1, row_characters=row_characters)
    if text:
        _LOG.warning("%s", text)


def _stage(
    algorithm: str,
    config: LoopConfig,
    settings: TrainerSettings,
    start: Path,
    reference: Path | None,
) -> StageLoad:
    rollouts = None
    if isinstance(settings, RolloutSettings):
        rollouts = Rollouts(
            settings.generation, settings.max_prompt_tokens, settings.max_rollout_tokens
        )
    is_read = reference is not None and config.reads_reference
    return training_stage(
        algorithm,
        algorithm,
        config,
        StageSetup(settings.training, settings.cluster, settings.dtype),
        sizes=_sizes(start),
        reference=_sizes(reference) if is_read and reference else None,
        rollouts=rollouts,
    )


def _with_scorers(load: StageLoad, settings: TrainerSettings, spec: RunSpec) -> StageLoad:
    """Adds the scoring models; memory of models that are not in a folder is left out."""
    if not isinstance(settings, RolloutSettings) or spec.scorer is not None:
        return load
    reward_model_sizes = _sizes(spec.reward_model) if spec.reward_model else None
    scorers: tuple[ScorerLoad, ...] = ()
    try:
        scorers = tuple(scorers_of(settings.environment, _config_in, run_sizes=reward_model_sizes))
    except OSError as error:
        _LOG.warning("memory of the scorers was not planned: %s", error)
    dedicated = dedicated_bundles_of_scorers(settings.environment)
    return replace(load, scorers=scorers, own_scorers=dedicated)


def _sizes(folder: Path) -> ModelSizes:
    return sizes_of(_config_in(str(folder)))


def _config_in(folder: str) -> Mapping[str, Any]:
    config: Mapping[str, Any] = json.loads((Path(folder).expanduser() / "config.json").read_text())
    return config
