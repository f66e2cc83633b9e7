"""What a trainer asks of its GPUs, for settings of `training` that are `auto`."""

import json
import logging
from pathlib import Path

from nemo_rl_core.config.trainer import LoopConfig, RolloutSettings, TrainerSettings
from nemo_rl_core.config.training import open_choices
from nemo_rl_core.errors import NemoRLError
from nemo_rl_core.planning.load import StageLoad
from nemo_rl_core.planning.sizes import ModelSizes, sizes_of
from nemo_rl_core.planning.stages import Rollouts, TrainingPlace, reads_reference, training_stage
from nemo_rl_core.trainers.loop import RunSpec

_LOG = logging.getLogger(__name__)


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
    rollouts = None
    if isinstance(settings, RolloutSettings):
        rollouts = Rollouts(
            settings.generation, settings.max_prompt_tokens, settings.max_rollout_tokens
        )
    try:
        is_read = spec.reference is not None and reads_reference(algorithm, config)
        return training_stage(
            algorithm,
            algorithm,
            config,
            TrainingPlace(settings.training, settings.cluster, settings.dtype),
            sizes=_sizes(spec.start),
            reference=_sizes(spec.reference) if is_read and spec.reference else None,
            rollouts=rollouts,
        )
    except NemoRLError as error:
        _LOG.warning("memory was not planned: %s", error.in_one_line)
        return None


def _sizes(folder: Path) -> ModelSizes:
    return sizes_of(json.loads((folder / "config.json").read_text()))
