"""Settings that a trainer fills in for its model and this machine."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
from nemo_rl_core.data.pretrained import sampling_length
from nemo_rl_core.distributed.resources import count_gpus
from nemo_rl_core.telemetry.model_flops import num_parameters

_LOG = logging.getLogger(__name__)


def with_defaults_of(
    model: str | Path | ModelConfig, config: Mapping[str, Any], trainer: Any
) -> dict[str, Any]:
    """A trainer's settings with what follows from a pretrained model; others stay as they are.

    Args:
        model: What is trained.
        config: The settings that are given, as nested mappings.
        trainer: The trainer's class.
    """
    if not isinstance(model, str | Path) and model.kind != "pretrained":
        return dict(config)
    folder = Path(model if isinstance(model, str | Path) else model.name).expanduser()
    is_here = (folder / "config.json").is_file()
    context = DefaultsContext(count_gpus(), sampling_length(folder) if is_here else None)
    samples = "generation" in trainer.settings_class.model_fields
    found = defaults_of_pretrained(
        config, section=trainer.algorithm, samples=samples, context=context
    )
    if found:
        _LOG.warning("chosen for the pretrained model %s: %s", folder.name, as_sentence(found))
    result = filled(config, found)
    if ClusterConfig.model_validate(result.get("cluster") or {}).num_gpus:
        result = with_judges_of_gpus(result)
    _warn_of_the_rate(result, trainer.algorithm, folder if is_here else None)
    return result


def _warn_of_the_rate(config: Mapping[str, Any], section: str, folder: Path | None) -> None:
    rate = (config.get(section) or {}).get("learning_rate")
    if rate is None or folder is None:
        return
    training = config.get("training") or {}
    lora = training.get("lora") if isinstance(training, Mapping) else None
    text = rate_warning(
        section, float(rate), num_parameters=num_parameters(folder), uses_lora=lora is not None
    )
    if text:
        _LOG.warning("%s", text)
