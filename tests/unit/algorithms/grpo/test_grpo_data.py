"""Hand-computed tensors and advantages of rollouts."""

import math
from dataclasses import replace

import pandas as pd
import pytest
import torch

from nemo_rl_core.algorithms.grpo.config import GRPOConfig
from nemo_rl_core.algorithms.grpo.data import (
    add_advantages,
    grpo_batch,
    kl_penalties,
    with_outcomes,
)
from nemo_rl_core.errors import ConfigError, RewardError
from nemo_rl_core.rollouts.batch import mean_advantages
from nemo_rl_core.rollouts.records import load_rollouts, save_rollouts
from nemo_rl_core.types import Completion, Prompt, Rollout

S = math.sqrt(0.5)
"""The normalized advantage of the better of two."""


def rollout(reward, length=1, truncated=False, components=()):
    prompt = Prompt(id="p", text="?", token_ids=(7, 8), answer="", task="t")
    completion = Completion((5,) * length, (-0.5,) * length, truncated)
    return Rollout(prompt, completion, "x", reward=reward, components=components)


def batch_of(*rollouts, group=2):
    placed = [replace(each, group=index // group) for index, each in enumerate(rollouts)]
    return grpo_batch(placed)


def advantages(batch, max_new_tokens=10, **values):
    config = GRPOConfig.model_validate({"num_generations_per_prompt": 2, **values})
    outcomes = with_outcomes(batch, config, max_new_tokens=max_new_tokens)
    return add_advantages(outcomes, config)["advantages"]


def close(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected).float(), rtol=1e-4, atol=1e-6)


def test_batch_by_hand():
    batch = batch_of(rollout(1.0), rollout(0.0, length=3, truncated=True))
    assert batch["input_ids"].tolist() == [[7, 8, 5, 0, 0], [7, 8, 5, 5, 5]]
    assert batch["token_mask"].int().tolist() == [[0, 1, 0, 0], [0, 1, 1, 1]]
    assert batch["generation_logprobs"].tolist() == [[0, -0.5, 0, 0], [0, -0.5, -0.5, -0.5]]
    assert batch["rewards"].tolist() == [1, 0]
    assert batch["group_ids"].tolist() == [0, 0]
    assert batch["truncated"].tolist() == [False, True]
    assert "reward_components" not in batch


def test_groups_are_read_from_the_rollouts():
    # the second of group 7 failed and is missing; group 2 is complete
    rollouts = [replace(rollout(1.0), group=7), *[replace(rollout(r), group=2) for r in (3.0, 1.0)]]
    batch = grpo_batch(rollouts)
    assert batch["group_ids"].tolist() == [7, 2, 2]
    actual = advantages(batch, advantage={"kind": "leave_one_out"})
    close(actual, [[0, 0], [0, 2], [0, -2]])


def test_only_the_tokens_of_the_policy_count():
    several = Completion((5, 9, 9, 6), (-0.5, 0.0, 0.0, -0.25), False, (True, False, False, True))
    turns = replace(rollout(1.0), completion=several, turn_rewards=(0.0, 1.0))
    batch = grpo_batch([turns, replace(rollout(0.0), turn_rewards=(0.0,))])
    assert batch["input_ids"].tolist() == [[7, 8, 5, 9, 9, 6], [7, 8, 5, 0, 0, 0]]
    assert batch["token_mask"].int().tolist() == [[0, 1, 0, 0, 1], [0, 1, 0, 0, 0]]
    assert batch["generation_logprobs"].tolist() == [[0, -0.5, 0, 0, -0.25], [0, -0.5, 0, 0, 0]]
    assert batch["num_turns"].tolist() == [2, 1]
    close(
        advantages(batch, advantage={"kind": "group_centered"}),
        [[0, 0.5, 0, 0, 0.5], [0, -0.5, 0, 0, 0]],
    )


def test_components_are_a_column():
    batch = batch_of(rollout(1.0, components=(1.0, 0.0)), rollout(3.0, components=(1.0, 2.0)))
    assert batch["reward_components"].tolist() == [[1, 0], [1, 2]]
    with pytest.raises(RewardError, match="1, 2"):
        batch_of(rollout(1.0, components=(1.0,)), rollout(3.0, components=(1.0, 2.0)))


def test_an_unscored_rollout_is_refused():
    with pytest.raises(ValueError, match="'p' has not been scored"):
        batch_of(rollout(1.0), rollout(None))
    with pytest.raises(RewardError, match=r"could not be scored(.|\n)*out of paper"):
        batch_of(rollout(1.0), rollout(None).failed("out of paper"))


@pytest.mark.parametrize(
    ("kind", "best", "other"),
    [("group_normalized", S, -S), ("group_centered", 0.5, -0.5), ("leave_one_out", 1, -1)],
)
def test_outcomes_reach_every_generated_token(kind, best, other):
    batch = batch_of(rollout(1.0), rollout(0.0, length=2))
    close(advantages(batch, advantage={"kind": kind}), [[0, best, 0], [0, other, other]])


def test_the_input_batch_is_not_changed():
    batch = batch_of(rollout(1.0), rollout(0.0, truncated=True))
    advantages(batch, overlong={"kind": "filter"})
    assert "advantages" not in batch
    assert batch["sample_mask"].tolist() == [1, 1]


def test_overlong_completions_lose_reward():
    batch = batch_of(rollout(1.0), rollout(1.0, length=4))
    # limit 4, buffer 2: the long one is at the limit and loses 0.5
    actual = advantages(
        batch,
        max_new_tokens=4,
        advantage={"kind": "group_centered"},
        overlong={"buffer_tokens": 2, "penalty": 0.5},
    )
    close(actual, [[0, 0.25, 0, 0, 0], [0, -0.25, -0.25, -0.25, -0.25]])
    assert batch["rewards"].tolist() == [1, 1]


def test_tokens_of_the_environment_count_toward_the_limit():
    # 2 tokens of the policy and 2 of the environment reach the limit of 4; so do 1 token of the
    # policy and an answer of 5 that did not fit, which costs no more than the penalty.
    turns = Completion((5, 9, 9, 6), (-0.5, 0, 0, -0.5), False, (True, False, False, True))
    cut = Completion((5,), (-0.5,), True, num_unread_tokens=5)
    batch = batch_of(
        rollout(1.0), *[replace(rollout(1.0), completion=each) for each in (turns, cut)], group=3
    )
    actual = advantages(
        batch,
        max_new_tokens=4,
        num_generations_per_prompt=3,
        advantage={"kind": "group_centered"},
        overlong={"buffer_tokens": 2, "penalty": 0.6},
    )
    # 1, 0.4, 0.4
    close(actual, [[0, 0.4, 0, 0, 0], [0, -0.2, 0, 0, -0.2], [0, -0.2, 0, 0, 0]])


def test_truncated_completions_are_filtered_but_count_in_their_group():
    batch = batch_of(rollout(1.0), rollout(0.0, truncated=True))
    config = GRPOConfig.model_validate(
        {"advantage": {"kind": "group_centered"}, "overlong": {"kind": "filter"}}
    )
    actual = add_advantages(with_outcomes(batch, config, max_new_tokens=10), config)
    assert actual["sample_mask"].tolist() == [1, 0]
    close(actual["advantages"], [[0, 0.5], [0, 0]])


def with_logprobs(batch):
    """KL k1 = prev - ref of 1 at the first generated token and 3 at the others."""
    shape = batch["token_mask"].shape
    batch["prev_logprobs"] = torch.full(shape, -1.0)
    batch["reference_logprobs"] = torch.full(shape, -4.0)
    batch["reference_logprobs"][:, :2] = torch.tensor([math.nan, -2.0])
    return batch


IN_REWARD = {"kl": {"kind": "k1", "beta": 0.1, "place": "in_reward"}}


def test_kl_is_summed_over_the_sequence_for_groups():
    batch = with_logprobs(batch_of(rollout(1.0), rollout(0.5, length=2)))
    # 1 - 0.1 * 1 and 0.5 - 0.1 * (1 + 3): 0.9 and 0.1
    actual = advantages(batch, advantage={"kind": "leave_one_out"}, loss=IN_REWARD)
    close(actual, [[0, 0.8, 0], [0, -0.8, -0.8]])


def test_kl_in_the_reward_is_divided_by_the_std_of_the_outcomes():
    # Outcomes 1 and 0, KL 1 and 4: 0.9 and -0.4, deviations +-0.65, over the std S of 1 and 0.
    batch = with_logprobs(batch_of(rollout(1.0), rollout(0.0, length=2)))
    actual = advantages(batch, advantage={"kind": "group_normalized"}, loss=IN_REWARD)
    close(actual, [[0, 0.65 / S, 0], [0, -0.65 / S, -0.65 / S]])


def test_a_filtered_truncated_completion_still_has_its_kl():
    # The group's mean is of both: 1 - 0.1 * 1 and 0.5 - 0.1 * (1 + 3).
    batch = with_logprobs(batch_of(rollout(1.0), rollout(0.5, length=2, truncated=True)))
    filtered = {"overlong": {"kind": "filter"}, "loss": IN_REWARD}
    close(
        advantages(batch, advantage={"kind": "leave_one_out"}, **filtered), [[0, 0.8, 0], [0] * 3]
    )
    config = GRPOConfig.model_validate(filtered)
    outcomes = with_outcomes(batch, config, max_new_tokens=10)
    assert outcomes["sample_mask"].tolist() == [1, 0]
    close(kl_penalties(outcomes, config), [0.1, 0.4])


@pytest.mark.parametrize("beta", [1e-4, 0.01, 1.0])
def test_kl_does_not_distinguish_equal_outcomes(beta):
    # The case of math.md: if divided by the std of the KL, the KL would count in full for any beta.
    batch = with_logprobs(batch_of(rollout(1.0), rollout(1.0, length=2)))
    loss = {"kl": {"kind": "k1", "beta": beta, "place": "in_reward"}}
    actual = advantages(batch, advantage={"kind": "group_normalized"}, loss=loss)
    assert actual.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_kl_in_the_loss_does_not_change_rewards():
    batch = batch_of(rollout(1.0), rollout(0.5, length=2))
    actual = advantages(batch, advantage={"kind": "leave_one_out"})
    close(actual, [[0, 0.5, 0], [0, -0.5, -0.5]])


def test_kl_is_a_reward_of_each_token_for_reinforce_plus_plus():
    batch = with_logprobs(batch_of(rollout(1.0), rollout(0.5, length=2), group=1))
    actual = advantages(
        batch,
        num_generations_per_prompt=1,
        advantage={"kind": "reinforce_plus_plus"},
        loss=IN_REWARD,
    )
    # returns 1 - 0.1; (0 - 0.1) + (0.5 - 0.3) = 0.1 and 0.5 - 0.3 = 0.2
    # mean 0.4, deviations 0.5, -0.3, -0.2, squares 0.38, variance 0.19
    std = math.sqrt(0.19)
    close(actual, [[0, 0.5 / std, 0], [0, -0.3 / std, -0.2 / std]])


def test_the_baseline_first_subtracts_the_group_mean():
    batch = batch_of(rollout(3.0), rollout(1.0), rollout(9.0), rollout(9.0))
    values = {"advantage": {"kind": "reinforce_plus_plus_baseline"}, "loss": {"kl": None}}
    # 1, -1, 0, 0: mean 0, variance 2/3; without the baseline the second group would be best
    std = math.sqrt(2 / 3)
    close(advantages(batch, **values), [[0, 1 / std], [0, -1 / std], [0, 0], [0, 0]])


def test_gdpo_reads_the_components():
    batch = batch_of(
        rollout(1.0, components=(1.0, 0.0)),
        rollout(1.0, components=(0.0, 1.0)),
        rollout(0.0, components=(0.0, 0.0)),
        rollout(0.0, components=(0.0, 0.0)),
    )
    actual = advantages(batch, advantage={"kind": "gdpo", "weights": [3, 1]}, loss={"kl": None})
    # 3 S - S, -3 S + S, 0, 0: whitened 2 S / sqrt(8 S^2 / 3)
    expected = math.sqrt(3 / 2)
    close(actual, [[0, expected], [0, -expected], [0, 0], [0, 0]])


@pytest.mark.parametrize("components", [(), (1.0,)])
def test_gdpo_without_components_reports_how_many_it_needs(components):
    batch = batch_of(rollout(1.0, components=components), rollout(1.0, components=components))
    with pytest.raises(ConfigError, match=r"2 rewards(.|\n)*got: \d from"):
        advantages(batch, advantage={"kind": "gdpo", "weights": [1, 1]}, loss={"kl": None})


def test_gdpo_refuses_a_reward_that_does_not_apply():
    batch = batch_of(rollout(1.0, components=(1.0, math.nan)), rollout(0.0, components=(0.0, 1.0)))
    with pytest.raises(RewardError, match=r"return 0\.0 instead of None"):
        advantages(batch, advantage={"kind": "gdpo", "weights": [1, 1]}, loss={"kl": None})


def test_a_reward_that_does_not_apply_is_recorded(tmp_path):
    rollouts = [rollout(1.0, components=(1.0, math.nan)), rollout(0.0, components=(0.0, 1.0))]
    save_rollouts(rollouts, tmp_path / "step.parquet")
    (first, second) = load_rollouts(tmp_path / "step.parquet")
    assert first.components[0] == 1.0
    assert math.isnan(first.components[1])
    assert second.components == (0.0, 1.0)


def test_rows_hold_the_mean_advantage(tmp_path):
    rollouts = [rollout(1.0), rollout(0.0, length=2)]
    batch = batch_of(*rollouts)
    batch["advantages"] = torch.tensor([[9.0, 2.0, 9.0], [9.0, 1.0, 4.0]])
    save_rollouts(rollouts, tmp_path / "rows.parquet", advantages=mean_advantages(batch))
    rows = pd.read_parquet(tmp_path / "rows.parquet").to_dict("records")
    assert [row["advantage"] for row in rows] == [2, 2.5]
    assert list(rows[1]["completion_ids"]) == [5, 5]
    assert rows[1]["reward"] == 0
