from dataclasses import replace

import pytest

from nemo_rl_core.config.single_turn import ExactMatch
from nemo_rl_core.environments.adapt import EnvironmentScorer, as_environment, as_scorer
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.environments.interfaces import Scorer, raise_first, score_rollouts
from nemo_rl_core.environments.multi_turn.replies import Reply, joined_replies
from nemo_rl_core.environments.rewards.functional_reward import FunctionalRewardWrapper
from nemo_rl_core.errors import ConfigError, RewardError


def length(prompt: str, response: str) -> float:
    return float(len(response))


def test_a_scorer_is_taken_as_it_is():
    for scorer in (make_scorer(ExactMatch()), FunctionalRewardWrapper(length)):
        assert as_scorer(scorer) is scorer


def test_a_custom_scorer_needs_only_score(rollout):
    class Halves(Scorer):
        def score(self, rollouts):
            return [0.5] * len(rollouts)

    scorer = as_scorer(Halves())
    assert [each.reward for each in score_rollouts(scorer, [rollout("a"), rollout("b")])] == [
        0.5,
        0.5,
    ]
    scorer.close()


def test_a_function_and_an_environment_reach_the_rollouts(rollout):
    class Environment:
        """An object that has only the method `step`."""

        step = FunctionalRewardWrapper(length).step

    for reward in (length, Environment()):
        (scored,) = score_rollouts(as_scorer(reward), [rollout("four")])
        assert (scored.reward, scored.components) == (4.0, ())


def picky(prompt: str, response: str) -> float:
    if response == "bad":
        raise LookupError("cannot read it")
    return float(len(response))


def picky_batch(prompts: list[str], responses: list[str]) -> list[float]:
    return [picky("", response) for response in responses]


class PickyEnvironment:
    """Raises for the full batch if one row is bad."""

    step = FunctionalRewardWrapper(picky_batch).step


class QuarantiningEnvironment:
    """Reports which rows it cannot score."""

    def step(self, logs, metadata):
        texts = [log[-1]["content"] for log in logs]
        replies = [
            Reply(error="LookupError: cannot read it") if text == "bad" else Reply(len(text))
            for text in texts
        ]
        return joined_replies(replies)


@pytest.mark.parametrize(
    "reward", [picky, picky_batch, PickyEnvironment(), QuarantiningEnvironment()]
)
def test_a_row_that_cannot_be_scored_costs_no_other_its_score(rollout, reward):
    scorer = as_scorer(reward)
    outcomes = scorer.score([rollout(text) for text in ("a", "bad", "ccc")])
    assert (outcomes[0], outcomes[2]) == (1.0, 3.0)
    assert isinstance(outcomes[1], RewardError)
    assert "LookupError: cannot read it" in outcomes[1].got
    with pytest.raises(RewardError, match="'bad'"):
        raise_first(scorer.score([rollout("a"), rollout("bad")]))


def test_a_wrong_number_of_replies_fails_every_row(rollout):
    class One:
        def step(self, logs, metadata):
            return joined_replies([Reply(1.0)] * 2)

    outcomes = as_scorer(One()).score([rollout(text) for text in "abc"])
    assert all(isinstance(each, RewardError) for each in outcomes)


def test_a_scorer_as_an_environment_sees_prompt_answer_task_and_metadata(rollout):
    seen = []

    class Remembers(Scorer):
        def score(self, rollouts):
            seen.extend(rollouts)
            failure = RewardError("no score", got="a reason")
            return [failure if each.text == "bad" else 0.5 for each in rollouts]

    environment = as_environment(Remembers())
    rows = [rollout(text, task="t", metadata='{"own": 1}') for text in ("good", "bad")]
    # Converted to a scorer again: texts and metadata survive the round trip.
    outcomes = EnvironmentScorer(environment).score(rows)
    assert outcomes[0] == 0.5
    assert "no score; got: a reason" in outcomes[1].got
    for row, converted in zip(rows, seen, strict=True):
        assert converted.text == row.text
        assert replace(converted.prompt, id="0", token_ids=(1,)) == row.prompt


def test_an_object_that_is_not_a_reward_is_refused():
    with pytest.raises(ConfigError, match="reward_fn is not a reward"):
        as_scorer(1.0)
