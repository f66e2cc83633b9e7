"""What scores a completion, found by the `kind` of its config."""

from pathlib import Path

from nemo_rl_core.config.environment import (
    CodeTests,
    EnvironmentConfig,
    ExactMatch,
    MathVerify,
    MultipleChoice,
    ReasoningGymScore,
    RewardFunction,
    RewardModelScore,
    ToolUse,
    WeightedSum,
)
from nemo_rl_core.environments.interfaces import Scorer
from nemo_rl_core.errors import ConfigError


def make_scorer(
    config: EnvironmentConfig, reward_model: Path | None = None, *, policy: Path | None = None
) -> Scorer:
    """A scorer that is ready; close it when done.

    Args:
        config: What it is to be. An environment with several turns becomes an `EnvironmentScorer`.
        reward_model: The folder for every `reward_model` in the config that names no model.
        policy: The folder of a model whose completions are scored; a reward model reads their token
            ids, so it must have the same vocabulary.

    Raises:
        ConfigError: When a reward function cannot be imported or called, or when the config has a
            reward model and one of the folders is missing.
        ModelError: When a reward model is none, or has another vocabulary than the policy.
        ResourceError: When programs must run, and this machine gives no sandbox.
    """
    match config:
        case RewardModelScore():
            return _reward_model_scorer(config, reward_model, policy)
        case WeightedSum(parts=parts):
            from nemo_rl_core.environments.weighted_sum import WeightedSumScorer

            scorers = [make_scorer(each.environment, reward_model, policy=policy) for each in parts]
            return WeightedSumScorer(scorers, [each.weight for each in parts])
        case ToolUse():
            from nemo_rl_core.environments.adapt import EnvironmentScorer
            from nemo_rl_core.environments.tools import ToolEnvironment, make_tools

            tools = make_tools(config.tools)
            return EnvironmentScorer(ToolEnvironment(config, tools, make_scorer(config.answer)))
    return _single_scorer(config)


def _single_scorer(
    config: ExactMatch
    | MathVerify
    | ReasoningGymScore
    | RewardFunction
    | MultipleChoice
    | CodeTests,
) -> Scorer:
    match config:
        case ExactMatch():
            from nemo_rl_core.environments.exact import ExactScorer

            return ExactScorer()
        case MathVerify():
            from nemo_rl_core.environments.math import MathScorer

            return MathScorer(timeout_seconds=config.timeout_seconds)
        case ReasoningGymScore():
            from nemo_rl_core.environments.reasoning_gym import ReasoningGymScorer

            return ReasoningGymScorer()
        case RewardFunction():
            from nemo_rl_core.environments.functional_reward import FunctionalRewardWrapper

            return FunctionalRewardWrapper.from_target(config.target)
        case MultipleChoice():
            from nemo_rl_core.environments.multiple_choice import MultipleChoiceScorer

            return MultipleChoiceScorer(num_choices=config.num_choices)
        case CodeTests():
            from nemo_rl_core.environments.code import CodeScorer

            return CodeScorer.from_config(config)


def _reward_model_scorer(
    config: RewardModelScore, reward_model: Path | None, policy: Path | None
) -> Scorer:
    name = config.model or reward_model
    if name is None:
        raise ConfigError(
            "the environment 'reward_model' has no model",
            expected="the name or folder of a reward model",
            got="no environment.model, and no reward model from a stage before",
            fix="set environment.model, or run a workflow that trains a reward model first",
        )
    if policy is None:
        raise ConfigError(
            "the environment 'reward_model' cannot tell whose token ids it would read",
            expected="the folder of the model that makes the completions",
            got="no policy",
            fix="pass make_scorer(..., policy=FOLDER)",
        )
    from nemo_rl_core.environments.reward_model import RewardModelScorer

    limit = config.max_tokens_per_batch
    return RewardModelScorer(str(name), policy=policy, max_tokens_per_batch=limit)
