"""What can be refused before anything starts: missing models and files, resources, rewards."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl_core.config.data import FileData
from nemo_rl_core.config.environment import RewardFunction
from nemo_rl_core.config.model import PretrainedModel
from nemo_rl_core.converters.materialize import check_pretrained
from nemo_rl_core.errors import DataError
from nemo_rl_core.infra.resources import check_shape
from tasks.experiment import GRPOExperiment


def preflight(inputs: Mapping[str, Any]) -> None:
    """Checks a local run's recipe against this machine.

    Raises:
        NemoRLError: For the first thing that is missing.
    """
    for value in inputs.values():
        if isinstance(value, GRPOExperiment):
            _check(value)


def _check(experiment: GRPOExperiment) -> None:
    check_shape(1, num_gpus=experiment.cluster.num_gpus)
    if isinstance(experiment.model, PretrainedModel):
        check_pretrained(experiment.model.name)
    if isinstance(experiment.data, FileData):
        _check_files(experiment.data)
    if isinstance(experiment.environment, RewardFunction):
        from nemo_rl_core.environments.functional_reward import load_function

        load_function(experiment.environment.target)


def _check_files(data: FileData) -> None:
    for name in (data.train, data.validation):
        if not Path(name).expanduser().is_file():
            raise DataError(
                "a data file does not exist",
                expected="a .jsonl, .csv or .parquet file with columns prompt and answer",
                got=name,
                fix="correct data.train or data.validation in the recipe",
            )
