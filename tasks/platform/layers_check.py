"""Whether the adapters and tensor ranks of a recipe fit the layers of its models."""

import json
import logging
import tempfile
from pathlib import Path

from nemo_rl_core.config.model import ModelConfig
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.environments.contents import located_model
from nemo_rl_core.errors import ConfigError
from tasks.platform.gpu_plan import config_of
from tasks.recipes.common import PipelineRecipe

_LOG = logging.getLogger(__name__)


def refuse_layers(experiment: PipelineRecipe) -> None:
    """Refuses targets of adapters that match nothing, and models that tensor ranks cannot split.

    Raises:
        ConfigError: Names the layers and the fix.
    """
    training = experiment.training
    if isinstance(training, DTensorTraining) and (
        training.lora is not None or training.tensor_parallel_size > 1
    ):
        for model in experiment.models:
            _refuse(model, training, is_trained=model is experiment.model)


def _refuse(model: ModelConfig, training: DTensorTraining, *, is_trained: bool) -> None:
    from nemo_rl_core.backends.training.dtensor.layer_check import check_layers

    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / Path(model.name).name
        folder.mkdir()
        try:
            config = config_of(located_model(model))
            (folder / "config.json").write_text(json.dumps(config))
            check_layers(folder, training, is_trained=is_trained)
        except ConfigError:
            raise
        # Named fault boundary: `prepare_model` names a model that cannot be had or made.
        except Exception as error:  # noqa: BLE001
            _LOG.debug("the layers of %s are not known: %s", model.name, error)
