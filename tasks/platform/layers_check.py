"""Whether the adapters and tensor ranks of a recipe fit the layers of its models."""

import json
import logging
import tempfile
from pathlib import Path

from nemo_rl_core.config.model import ModelConfig
from nemo_rl_core.config.training import DTensorTraining, Head
from nemo_rl_core.environments.contents import located_model
from nemo_rl_core.errors import ConfigError, ModelError
from nemo_rl_core.store.paths import resolve_below
from tasks.platform.gpu_plan import config_of
from tasks.recipes.common import PipelineRecipe

_LOG = logging.getLogger(__name__)


def refuse_layers(experiment: PipelineRecipe) -> None:
    """Refuses what does not fit a model: adapters, tensor ranks, a router's loss, a scalar head.

    Raises:
        ConfigError: Names the layers and the fix.
        ModelError: If the model has no scalar head.
    """
    training = experiment.training
    if isinstance(training, DTensorTraining) and (
        training.lora is not None
        or training.tensor_parallel_size > 1
        or training.router_aux_loss_coef
        or "scalar" in experiment.trained_heads
    ):
        for model in experiment.models:
            heads = experiment.trained_heads if model is experiment.model else []
            _refuse(model, training, heads)


def _refuse(model: ModelConfig, training: DTensorTraining, trained_heads: list[Head]) -> None:
    from nemo_rl_core.backends.training.dtensor.layer_check import check_layers

    with tempfile.TemporaryDirectory() as parent:
        folder = resolve_below(
            Path(parent), Path(model.name).name, source="the model of the recipe"
        )
        folder.mkdir()
        try:
            config = config_of(located_model(model))
            (folder / "config.json").write_text(json.dumps(config))
        # Named fault boundary: `prepare_model` names a model that cannot be had.
        except Exception as error:  # noqa: BLE001
            _LOG.debug("the config of %s is not known: %s", model.name, error)
            return
        try:
            check_layers(folder, training, trained_heads)
        except (ConfigError, ModelError):
            raise
        # Named fault boundary: `prepare_model` names a model that cannot be made.
        except Exception as error:  # noqa: BLE001
            _LOG.debug("the layers of %s are not known: %s", model.name, error)
