"""Settings that a trainer fills in for its model and this machine."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl_core.config.algorithm import Algorithm
from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.defaults import (
    DefaultsContext,
    as_sentence,
    defaults_of_pretrained,
    filled,
    rate_warning,
    with_judges_of_gpus,
)
from nemo_rl_core.config.model import ModelConfig
from nemo_rl_core.config.trainer import algorithm_of
from nemo_rl_core.data.pretrained import sampling_length
from nemo_rl_core.distributed.resources import count_gpus
from nemo_rl_core.telemetry.model_flops import num_parameters

_LOG = logging.getLogger(__name__)


def with_defaults_of(
    model: str | Path | ModelConfig, config: Mapping[str, Any], trainer: Any
) -> dict[str, Any]:
    """Fills in settings of a trainer's class that depend on its model; keeps explicit ones."""
    if not isinstance(model, str | Path) and model.kind != "pretrained":
        return dict(config)
    folder = Path(model if isinstance(model, str | Path) else model.name).expanduser()
    is_local = (folder / "config.json").is_file()
    context = DefaultsContext(count_gpus(), sampling_length(folder) if is_local else None)
    samples = "generation" in trainer.settings_class.model_fields
    algorithm = algorithm_of(trainer.settings_class, trainer.algorithm)
    defaults = defaults_of_pretrained(config, algorithm=algorithm, samples=samples, context=context)
    if defaults:
        _LOG.warning("chosen for the pretrained model %s: %s", folder.name, as_sentence(defaults))
    result = filled(config, defaults)
    if ClusterConfig.model_validate(result.get("cluster") or {}).num_gpus:
        result = with_judges_of_gpus(result)
    if is_local:
        _warn_about_learning_rate(result, trainer.algorithm, algorithm, folder)
    return result


def _warn_about_learning_rate(
    config: Mapping[str, Any], section: str, algorithm: Algorithm | None, folder: Path
) -> None:
    rate = (config.get(section) or {}).get("learning_rate")
    if rate is None:
        return
    training = config.get("training") or {}
    lora = training.get("lora") if isinstance(training, Mapping) else None
    text = rate_warning(
        section,
        float(rate),
        algorithm=algorithm,
        num_parameters=num_parameters(folder),
        uses_lora=lora is not None,
    )
    if text:
        _LOG.warning("%s", text)
