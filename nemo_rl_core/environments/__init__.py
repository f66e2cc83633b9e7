"""What scores a completion, found by the `kind` of its config."""

from nemo_rl_core.config.environment import (
    EnvironmentConfig,
    ExactMatch,
    MathVerify,
    ReasoningGymScore,
    RewardFunction,
)
from nemo_rl_core.environments.interfaces import Scorer


def make_scorer(config: EnvironmentConfig) -> Scorer:
    """A scorer that is ready; close it when done.

    Raises:
        ConfigError: When a reward function cannot be imported or called.
    """
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
