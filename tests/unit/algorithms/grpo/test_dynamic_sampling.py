"""The draws of a step, counted by hand."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from nemo_rl_core.algorithms.grpo.advantage_config import GDPO, AdvantageConfig, GroupNormalized
from nemo_rl_core.algorithms.grpo.config import DynamicSampling
from nemo_rl_core.algorithms.grpo.dynamic_sampling import StepDraws
from nemo_rl_core.types import Completion, Prompt, Rollout

G = 2
MIXED, SAME = (1.0, 0.0), (1.0, 1.0)


def draw(first_place: int, *groups: Sequence[float | None]) -> list[Rollout]:
    """Groups of scored rollouts; None is a rollout that could not be scored."""
    return [
        Rollout(
            Prompt(id=str(place), text="1+", token_ids=(5, 6), answer="", task="sums"),
            Completion((4,), (-0.5,), truncated=False),
            "",
            reward=reward,
            group=place,
            sample=sample,
            error=None if reward is not None else "no number",
        )
        for place, rewards in enumerate(groups, start=first_place)
        for sample, reward in enumerate(rewards)
    ]


def draws_of(
    *drawn: Sequence[Rollout], max_draws: int = 3, advantage: AdvantageConfig | None = None
) -> StepDraws:
    draws = StepDraws(
        DynamicSampling(max_draws=max_draws), advantage or GroupNormalized(), num_prompts=2
    )
    for number, rollouts in enumerate(drawn):
        assert draws.wants_more or number == 0
        draws.add(rollouts)
    return draws


def groups(draws: StepDraws) -> list[tuple[int, int]]:
    return [(each.group, each.sample) for each in draws.rollouts()]


def test_a_first_draw_with_enough_groups_is_the_step() -> None:
    draws = draws_of(draw(0, MIXED, MIXED))
    assert not draws.wants_more
    assert groups(draws) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert draws.metrics()["num_draws"] == 1.0


def test_missing_groups_come_from_further_draws_and_surplus_ones_are_dropped() -> None:
    draws = draws_of(draw(0, SAME, MIXED), draw(2, MIXED, MIXED))
    assert not draws.wants_more
    assert groups(draws) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    metrics = draws.metrics()
    assert metrics["num_draws"] == 2.0
    assert metrics["zero_variance_fraction"] == 0.25  # one of four groups
    assert metrics["reward"] == 5 / 8  # of all that was drawn


def test_after_the_last_draw_the_step_is_what_there_is() -> None:
    draws = draws_of(draw(0, SAME, SAME), draw(2, SAME, MIXED), draw(4, SAME, SAME))
    assert not draws.wants_more
    assert groups(draws) == [(3, 0), (3, 1)]


def test_without_any_group_to_learn_from_the_step_is_its_first_draw() -> None:
    draws = draws_of(draw(0, SAME, SAME), draw(2, SAME, SAME), max_draws=2)
    assert groups(draws) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_what_could_not_be_scored_stays_behind_the_groups() -> None:
    draws = draws_of(draw(0, (1.0, None), MIXED), draw(2, (None, 0.0), MIXED))
    found = draws.rollouts()
    assert [(each.group, each.sample) for each in found] == [
        (1, 0),
        (1, 1),
        (3, 0),
        (3, 1),
        (0, 1),
        (2, 0),
    ]
    assert [each.error for each in found] == [None] * 4 + ["no number"] * 2
    assert draws.metrics()["num_failed_rollouts"] == 2.0


def test_one_reward_that_differs_is_enough() -> None:
    parts = [(1.0, 0.0), (1.0, 1.0)]  # the first is the same
    rollouts = [replace(each, components=parts[each.sample]) for each in draw(0, MIXED, MIXED)]
    assert not draws_of(rollouts, advantage=GDPO(weights=[1.0, 1.0])).wants_more


@pytest.mark.parametrize(("advantage", "is_kept"), [(GroupNormalized(), False), (None, True)])
def test_several_rewards_are_compared_apart_where_the_advantage_is_of_each(
    advantage: AdvantageConfig | None, is_kept: bool
) -> None:
    parts = [(1.0, 0.0), (0.0, 1.0)]
    rollouts = [replace(each, components=parts[each.sample]) for each in draw(0, SAME, SAME)]
    draws = draws_of(rollouts, advantage=advantage or GDPO(weights=[1.0, 1.0]))
    assert draws.wants_more is not is_kept
