"""What a trainer asks of its GPUs, for settings of `training` that are `auto`."""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_rl_core.config.environment import own_bundles_of_scorers
from nemo_rl_core.config.trainer import LoopConfig, RolloutSettings, TrainerSettings
from nemo_rl_core.config.training import open_choices
from nemo_rl_core.data.loader import load_records
from nemo_rl_core.errors import NemoRLError
from nemo_rl_core.planning.cpu_hours import hours_warning
from nemo_rl_core.planning.load import ScorerLoad, StageLoad
from nemo_rl_core.planning.scorers import scorers_of
from nemo_rl_core.planning.sizes import ModelSizes, sizes_of
from nemo_rl_core.planning.stages import Rollouts, TrainingPlace, reads_reference, training_stage
from nemo_rl_core.trainers.loop import RunSpec
from nemo_rl_core.trainers.sections import steps_of

_LOG = logging.getLogger(__name__)
_ROWS_READ = 100
_TEXTS = ("prompt", "completion", "messages", "text", "chosen", "rejected")


def load_of_trainer(
    algorithm: str, config: LoopConfig, settings: TrainerSettings, spec: RunSpec
) -> StageLoad | None:
    """The load of a run, as `nemo-rl plan` has that of the stage.

    Args:
        algorithm: Name of its section.
        config: That section.
        settings: Of the trainer.
        spec: Whose models are on this machine.

    Returns:
        None where no GPU is used, nothing is to be chosen, or a model cannot be counted.
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

    Args:
        algorithm: Name of the algorithm's section.
        config: Section of the algorithm.
        settings: All settings of the trainer.
        start: The transformers folder of the first weights.
        train: The data set folder; rows are taken at the mean length of the first ones.
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
    is_read = reference is not None and reads_reference(algorithm, config)
    return training_stage(
        algorithm,
        algorithm,
        config,
        TrainingPlace(settings.training, settings.cluster, settings.dtype),
        sizes=_sizes(start),
        reference=_sizes(reference) if is_read and reference else None,
        rollouts=rollouts,
    )


def _with_scorers(load: StageLoad, settings: TrainerSettings, spec: RunSpec) -> StageLoad:
    """With the models that score, but those that are in no folder: their memory is left out."""
    if not isinstance(settings, RolloutSettings) or spec.scorer is not None:
        return load
    of_run = _sizes(spec.reward_model) if spec.reward_model else None
    scorers: tuple[ScorerLoad, ...] = ()
    try:
        scorers = tuple(scorers_of(settings.environment, _config_in, of_run=of_run))
    except OSError as error:
        _LOG.warning("what scores was not planned: %s", error)
    own = own_bundles_of_scorers(settings.environment)
    return replace(load, scorers=scorers, own_scorers=own)


def _sizes(folder: Path) -> ModelSizes:
    return sizes_of(_config_in(str(folder)))


def _config_in(folder: str) -> Mapping[str, Any]:
    read: Mapping[str, Any] = json.loads((Path(folder).expanduser() / "config.json").read_text())
    return read
