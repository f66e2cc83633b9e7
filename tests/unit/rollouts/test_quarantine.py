"""Rollouts that cannot be scored are set aside; too many of them stop a run."""

from dataclasses import replace

import pytest

from nemo_rl_core.environments.interfaces import score_rollouts
from nemo_rl_core.environments.rewards.functional_reward import FunctionalRewardWrapper
from nemo_rl_core.environments.rewards.weighted_sum import WeightedSumScorer
from nemo_rl_core.errors import RewardError
from nemo_rl_core.rollouts.batch import (
    failure_metrics,
    refuse_too_many_failures,
    valid_rollouts,
)
from nemo_rl_core.types import Completion, Prompt, Rollout


def rollout(text):
    prompt = Prompt(id="p", text="?", token_ids=(7, 8), answer="", task="t")
    return Rollout(prompt, Completion((5,), (-0.5,), truncated=False), text)


def length(prompt: str, response: str) -> float:
    if response == "boom":
        raise LookupError("no answer sheet")
    return float(len(response))


ROLLOUTS = [rollout("a"), rollout("boom"), rollout("abc")]


def test_a_scorer_sets_aside_what_it_cannot_score():
    scored = score_rollouts(FunctionalRewardWrapper(length), ROLLOUTS)
    assert [each.reward for each in scored] == [1.0, None, 3.0]
    assert [each.text for each in valid_rollouts(scored)] == ["a", "abc"]
    assert scored[0].error is scored[2].error is None
    assert "'length' raised" in scored[1].error
    assert "LookupError: no answer sheet" in scored[1].error
    assert failure_metrics(scored) == {"num_failed_rollouts": 1.0, "failed_fraction": 1 / 3}


def test_a_sum_keeps_the_components_of_scored_rollouts():
    parts = WeightedSumScorer([FunctionalRewardWrapper(length)] * 2, [2.0, 1.0])
    scored = score_rollouts(parts, ROLLOUTS)
    assert [(each.reward, each.components) for each in scored] == [
        (3.0, (1.0, 1.0)),
        (None, ()),
        (9.0, (3.0, 3.0)),
    ]
    assert "no answer sheet" in scored[1].error


def batch(num_failed, total):
    failed = [rollout("x").failed(f"reason {index % 5}") for index in range(num_failed)]
    return failed + [rollout("x").scored(1.0)] * (total - num_failed)


@pytest.mark.parametrize(("num_failed", "fraction"), [(0, 0.0), (1, 0.1), (5, 0.5), (9, 1.0)])
def test_a_run_continues_up_to_the_bound(num_failed, fraction):
    refuse_too_many_failures(batch(num_failed, 10), max_failed_fraction=fraction)


@pytest.mark.parametrize(("num_failed", "fraction"), [(1, 0.0), (2, 0.1), (10, 1.0)])
def test_a_run_stops_past_the_bound(num_failed, fraction):
    with pytest.raises(RewardError, match=f"{num_failed} of 10 rollouts could not be scored"):
        refuse_too_many_failures(batch(num_failed, 10), max_failed_fraction=fraction)


def test_the_first_different_errors_are_named():
    with pytest.raises(RewardError) as caught:
        refuse_too_many_failures(batch(9, 10), max_failed_fraction=0.1)
    assert caught.value.got == "reason 0; reason 1"
    assert len(str(caught.value).splitlines()) < 10


def test_a_failed_rollout_has_no_reward():
    assert replace(rollout("x"), reward=1.0).failed("why").reward is None
