import pytest

from nemo_rl_core.config.environment import ExactMatch
from nemo_rl_core.environments import make_scorer
from nemo_rl_core.environments.adapt import as_scorer
from nemo_rl_core.environments.functional_reward import FunctionalRewardWrapper
from nemo_rl_core.environments.interfaces import Scorer
from nemo_rl_core.errors import ConfigError


def length(prompt: str, response: str) -> float:
    return float(len(response))


def test_a_scorer_is_taken_as_it_is():
    for scorer in (make_scorer(ExactMatch()), FunctionalRewardWrapper(length)):
        assert as_scorer(scorer) is scorer


def test_a_class_of_ones_own_only_says_outcomes(rollout):
    class Halves(Scorer):
        def outcomes(self, rollouts):
            return [0.5] * len(rollouts)

    scorer = as_scorer(Halves())
    assert [each.reward for each in scorer.scored([rollout("a"), rollout("b")])] == [0.5, 0.5]
    scorer.close()


def test_a_function_and_an_environment_reach_the_rollouts(rollout):
    class Environment:
        """Not a scorer itself: it only takes steps."""

        step = FunctionalRewardWrapper(length).step

    for reward in (length, Environment()):
        (scored,) = as_scorer(reward).scored([rollout("four")])
        assert (scored.reward, scored.components) == (4.0, ())


def test_what_is_no_reward_is_refused():
    with pytest.raises(ConfigError, match="this is no reward"):
        as_scorer(1.0)
