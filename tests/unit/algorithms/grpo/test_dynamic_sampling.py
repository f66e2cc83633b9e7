"""Hand-counted draws of a step."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from nemo_rl_core.algorithms.grpo.advantage_config import GDPO, AdvantageConfig, GroupNormalized
from nemo_rl_core.algorithms.grpo.config import DynamicSampling
from nemo_rl_core.algorithms.grpo.data import StepDraws
from nemo_rl_core.config.functions import CustomAdvantage
from nemo_rl_core.types import Completion, Prompt, Rollout

G = 2
MIXED, SAME = (1.0, 0.0), (1.0, 1.0)


def draw(first_index: int, *groups: Sequence[float | None]) -> list[Rollout]:
    """Returns groups of rollouts with these rewards; None marks a failed rollout."""
    return [
        Rollout(
            Prompt(id=str(index), text="1+", token_ids=(5, 6), answer="", task="sums"),
            Completion((4,), (-0.5,), truncated=False),
            "",
            reward=reward,
            group=index,
            sample=sample,
            error=None if reward is not None else "no number",
        )
        for index, rewards in enumerate(groups, start=first_index)
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
    assert metrics["reward"] == 5 / 8  # of all drawn groups


def test_after_the_last_draw_the_step_has_fewer_groups() -> None:
    draws = draws_of(draw(0, SAME, SAME), draw(2, SAME, MIXED), draw(4, SAME, SAME))
    assert not draws.wants_more
    assert groups(draws) == [(3, 0), (3, 1)]


def test_without_any_group_to_learn_from_the_step_is_its_first_draw() -> None:
    draws = draws_of(draw(0, SAME, SAME), draw(2, SAME, SAME), max_draws=2)
    assert groups(draws) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_failed_rollouts_come_after_the_groups() -> None:
    draws = draws_of(draw(0, (1.0, None), MIXED), draw(2, (None, 0.0), MIXED))
    rollouts = draws.rollouts()
    assert [(each.group, each.sample) for each in rollouts] == [
        (1, 0),
        (1, 1),
        (3, 0),
        (3, 1),
        (0, 1),
        (2, 0),
    ]
    assert [each.error for each in rollouts] == [None] * 4 + ["no number"] * 2
    assert draws.metrics()["num_failed_rollouts"] == 2.0


def test_one_reward_that_differs_is_enough() -> None:
    parts = [(1.0, 0.0), (1.0, 1.0)]  # the first is the same
    rollouts = [replace(each, components=parts[each.sample]) for each in draw(0, MIXED, MIXED)]
    assert not draws_of(rollouts, advantage=GDPO(weights=[1.0, 1.0])).wants_more


@pytest.mark.parametrize(
    ("advantage", "is_kept"),
    [(GroupNormalized(), False), (None, True), (CustomAdvantage(target="mine:advantage"), True)],
)
def test_components_are_compared_separately_if_each_has_an_advantage(
    advantage: AdvantageConfig | None, is_kept: bool
) -> None:
    parts = [(1.0, 0.0), (0.0, 1.0)]
    rollouts = [replace(each, components=parts[each.sample]) for each in draw(0, SAME, SAME)]
    draws = draws_of(rollouts, advantage=advantage or GDPO(weights=[1.0, 1.0]))
    assert draws.wants_more is not is_kept
