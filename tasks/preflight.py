"""What can be refused before anything starts: missing models and files, resources, rewards."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl_core.config.data import FileData
from nemo_rl_core.config.environment import (
    RewardFunction,
    RewardModelScore,
    SingleEnvironmentConfig,
    WeightedSum,
    single_environments,
)
from nemo_rl_core.config.model import ModelFromConfig, PretrainedModel
from nemo_rl_core.converters.materialize import check_pretrained
from nemo_rl_core.data.pretrained import context_length
from nemo_rl_core.errors import ConfigError, DataError
from nemo_rl_core.infra.resources import ResourceManager
from tasks.experiments.common import Experiment


def preflight(inputs: Mapping[str, Any]) -> None:
    """Checks a local run's recipe against this machine.

    Raises:
        NemoRLError: For the first thing that is missing.
    """
    for value in inputs.values():
        if isinstance(value, Experiment):
            _check(value)


def _check(experiment: Experiment) -> None:
    # One core is enough for any number of workers: on a laptop they share it.
    ResourceManager.of_this_machine().check({"CPU": 1, "GPU": experiment.cluster.num_gpus})
    experiment.training.data_parallel_size(experiment.cluster.num_workers)
    for model in experiment.models:
        if isinstance(model, PretrainedModel):
            check_pretrained(model.name)
    for data in (experiment.data, experiment.evaluation.data):
        if isinstance(data, FileData):
            _check_files(data)
    _check_context(experiment)
    experiment.refuse_contradictions()
    for reward in experiment.rewards:
        for environment in single_environments(reward):
            _check_environment(environment)
    judge = experiment.judge
    if isinstance(judge, RewardModelScore | WeightedSum):
        raise ConfigError(
            f"the environment {judge.kind!r} gives scores, which do not say what is right",
            expected="an environment whose reward is 1 for a right completion, to evaluate with",
            got="no evaluation.environment",
            fix="say, for example, evaluation: {environment: {kind: exact}}",
        )


def _check_environment(environment: SingleEnvironmentConfig) -> None:
    if isinstance(environment, RewardFunction):
        from nemo_rl_core.environments.functional_reward import load_function

        load_function(environment.target)
    if isinstance(environment, RewardModelScore) and environment.model is None:
        raise ConfigError(
            "the environment 'reward_model' does not say which reward model scores",
            expected="environment.model: a folder of the workflow reward_model, or a hub name",
            got="no model",
            fix="name one; only grpo_reward of post_train is trained on the way",
        )


def _check_context(experiment: Experiment) -> None:
    model = experiment.model
    limit = None
    if isinstance(model, ModelFromConfig):
        limit = model.max_position_embeddings
    elif isinstance(model, PretrainedModel) and Path(model.name).expanduser().is_dir():
        limit = context_length(Path(model.name).expanduser())
    prompt = experiment.data.max_prompt_tokens
    completion = experiment.rollouts.max_rollout_tokens or experiment.generation.max_new_tokens
    if limit is not None and prompt + completion > limit:
        raise ConfigError(
            "prompts and completions may be longer than the model's context",
            expected="data.max_prompt_tokens + generation.max_new_tokens (or "
            f"rollouts.max_rollout_tokens) <= {limit}",
            got=f"{prompt} + {completion}",
            fix="lower one of the two, or take a model with a longer context",
        )


def _check_files(data: FileData) -> None:
    for name in (data.train, data.validation):
        if not Path(name).expanduser().exists():
            raise DataError(
                "a data file does not exist",
                expected="a .jsonl, .csv, .parquet or .arrow file, or a folder of such",
                got=name,
                fix="correct data.train or data.validation in the recipe",
            )
