"""Episodes with several training samples: each counts once, and its tokens as in one sample."""

import math
import pickle
import random
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_core.algorithms.grpo.advantage_config import (
    GroupCentered,
    GroupNormalized,
)
from nemo_rl_core.algorithms.grpo.config import (
    DynamicSampling,
    GRPOConfig,
    GRPOSettings,
    credits_turns,
)
from nemo_rl_core.algorithms.grpo.data import StepDraws, add_advantages, grpo_batch, with_outcomes
from nemo_rl_core.algorithms.grpo.loss import GRPOLossFn
from nemo_rl_core.algorithms.grpo.loss_config import ClippedLoss, ReinforceLoss
from nemo_rl_core.algorithms.ppo.config import PPOConfig
from nemo_rl_core.algorithms.ppo.data import unwhitened_advantages
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConfigError, RewardError
from nemo_rl_core.evals.metrics import accuracy_metrics
from nemo_rl_core.functional.custom_advantage import AdvantageFunction
from nemo_rl_core.functional.masked import num_trained_sequences, valid_token_mask
from nemo_rl_core.rollouts.batch import (
    failure_metrics,
    refuse_too_many_failures,
    rollout_metrics,
    turn_returns,
)
from nemo_rl_core.rollouts.listing import listed, shown
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.rollouts.remote_rollouts import RemoteRollouts
from nemo_rl_core.rollouts.sampler import post_process_rollouts
from nemo_rl_core.trainers.rollouts import num_parts, train_in_parts
from nemo_rl_core.types import Completion, Prompt, Rollout
from tasks.recipes.grpo import GRPORecipe
from tests.episode_samples import split_by_turn

PROMPT = Prompt("p", "?", (7, 8), "", "t")


def episode(*turn_rewards: float, sample: int = 0, group: int = 0, **values: Any) -> Rollout:
    """Turn k has k + 1 tokens, and the environment answers each turn but the last with one."""
    turns = range(len(turn_rewards))
    ids, mask = [9], [False]
    for turn in turns:
        ids += [5 + (sample + turn + n) % 4 for n in range(turn + 1)] + [9]
        mask += [True] * (turn + 1) + [False]
    completion = Completion(
        tuple(ids[1:-1]),
        tuple(-0.5 * part for part in mask[1:-1]),
        values.pop("truncated", False),
        tuple(mask[1:-1]),
    )
    return Rollout(
        PROMPT,
        completion,
        "x",
        reward=sum(turn_rewards),
        group=group,
        sample=sample,
        turn_rewards=turn_rewards,
        **values,
    )


def one_two_three() -> list[Rollout]:
    """A group of three episodes with 1, 2 and 3 turns and the rewards 4, 1 and 1."""
    parts = [(1.0, 3.0), (1.0, 0.0), (0.0, 1.0)]
    turns = [(4.0,), (0.0, 1.0), (1.0, 0.5, -0.5)]
    return [
        replace(episode(*each, sample=sample), components=parts[sample])
        for sample, each in enumerate(turns)
    ]


ROWS = [0, 1, 1, 2, 2, 2]
"""The episode of each sample of `split_by_turn(one_two_three())`."""


def advantages(rollouts: list[Rollout], fn: Any = None, **values: Any) -> BatchedDataDict:
    config = GRPOConfig.model_validate({"num_generations_per_prompt": 3, **values})
    batch = grpo_batch(rollouts)
    logprobs = torch.zeros(batch["token_mask"].shape)
    batch.update(prev_logprobs=logprobs, reference_logprobs=logprobs - 1.0)
    if credits_turns(config.advantage):
        batch["turn_returns"] = turn_returns(rollouts)
    return add_advantages(with_outcomes(batch, config, max_new_tokens=8), config, fn)


def by_row(batch: BatchedDataDict) -> list[float]:
    """The advantage of each row, whose tokens have the same one; 0 elsewhere."""
    values, mask = batch["advantages"], batch["token_mask"].bool()
    assert (values[~mask] == 0).all()
    rows = [value[kept].unique().tolist() for value, kept in zip(values, mask, strict=True)]
    assert all(len(each) == 1 for each in rows)
    return [each[0] for each in rows]


S = math.sqrt(3.0)  # the unbiased standard deviation of 4, 1 and 1
BY_HAND: dict[str, tuple[dict[str, Any], list[float]]] = {
    "grpo": ({"advantage": {"kind": "group_normalized"}}, [2 / S, -1 / S, -1 / S]),
    "dr_grpo": ({"preset": "dr_grpo"}, [2.0, -1.0, -1.0]),
    "leave one out": ({"advantage": {"kind": "leave_one_out"}}, [3.0, -1.5, -1.5]),
    # 4 less 0.5, 1 less 1.5 and 1 less 3: half a nat for each of 1, 3 and 6 tokens
    "rloo": (
        {"preset": "rloo", "num_generations_per_prompt": 3, "loss": {"kl": {"beta": 0.5}}},
        [3.5 - (-0.5 - 2.0) / 2, -0.5 - (3.5 - 2.0) / 2, -2.0 - (3.5 - 0.5) / 2],
    ),
    # 1, 1, 0 and 3, 0, 1 have the deviations 0.57735 and 1.52753; their sums have 1.54206
    "gdpo": ({"preset": "gdpo"}, [1.08195, -0.19164, -0.89031]),
    # of ten tokens, one has the return 4 and nine have 1: mean 1.3, deviation sqrt(0.9)
    "reinforce_plus_plus": (
        {"preset": "reinforce_plus_plus", "loss": {"kl": None}},
        [2.7 / 0.9**0.5, -0.3 / 0.9**0.5, -0.3 / 0.9**0.5],
    ),
    "reinforce_plus_plus_baseline": (
        {"advantage": {"kind": "reinforce_plus_plus_baseline"}},
        [2.7 / 0.9**0.5, -0.3 / 0.9**0.5, -0.3 / 0.9**0.5],
    ),
    # the limit is 8, the buffer 4: 1, 4 and 8 tokens cost 0, 0 and 2
    "long ones punished": (
        {
            "advantage": {"kind": "group_centered"},
            "overlong": {"buffer_tokens": 4, "penalty": 2.0},
        },
        [4 - 4 / 3, 1 - 4 / 3, -1 - 4 / 3],
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_an_episode_counts_once_in_its_group(name: str) -> None:
    values, expected = BY_HAND[name]
    samples = split_by_turn(one_two_three())
    assert [each.part for each in samples] == [0, 0, 1, 0, 1, 2]
    actual = by_row(advantages(samples, **values))
    assert actual == pytest.approx([expected[row] for row in ROWS], abs=2e-5)
    assert by_row(advantages(one_two_three(), **values)) == pytest.approx(expected, abs=2e-5)


def test_a_custom_advantage_gets_one_row_per_episode() -> None:
    seen = {}

    def largest(rewards: Tensor, groups: Tensor, num_turns: Tensor) -> Tensor:
        seen.update(rewards=rewards.tolist(), groups=groups.tolist(), turns=num_turns.tolist())
        return rewards - rewards.max()

    def of_tokens(rewards: Tensor, token_mask: Tensor) -> Tensor:
        return rewards

    samples, custom = split_by_turn(one_two_three()), {"kind": "function", "target": "a:b"}
    batch = advantages(samples, AdvantageFunction(largest, "largest"), advantage=custom)
    assert by_row(batch) == [0, -3, -3, -3, -3, -3]
    assert seen == {"rewards": [4, 1, 1], "groups": [0, 0, 0], "turns": [1, 2, 3]}
    with pytest.raises(ConfigError, match=r"of_tokens(.|\n)*got: token_mask"):
        advantages(samples, AdvantageFunction(of_tokens, "of_tokens"), advantage=custom)


def test_truncated_episodes_are_left_out_with_all_their_samples() -> None:
    cut = [*one_two_three()[:2], replace(one_two_three()[2], completion=_cut(one_two_three()[2]))]
    batch = advantages(split_by_turn(cut), overlong={"kind": "filter"})
    assert batch["sample_mask"].tolist() == [1, 1, 1, 0, 0, 0]
    assert batch["rollout_lengths"].tolist() == [1, 4, 4, 8, 8, 8]  # with one token of each answer
    assert batch["truncated"].tolist() == [False] * 5 + [True]


def _cut(rollout: Rollout) -> Completion:
    return replace(rollout.completion, truncated=True)


@pytest.mark.parametrize(
    "reduction", ["token_mean", "sequence_mean", {"kind": "constant", "max_tokens": 5}]
)
def test_gradients_are_those_of_a_plain_loop_over_episodes(reduction: Any) -> None:
    """The policy's logits depend on the token before, so a sample has those of its episode."""
    table = torch.randn(10, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def expected(weights: Tensor) -> Tensor:
        total, sizes = weights.new_zeros(()), []
        for rollout, advantage in zip(one_two_three(), (2 / S, -1 / S, -1 / S), strict=True):
            ids = (7, 8, *rollout.completion.token_ids)
            values = [
                -advantage * weights[ids[n + 1]].log_softmax(-1)[ids[n + 2]]
                for n, is_new in enumerate(rollout.completion.token_mask)
                if is_new
            ]
            sizes.append(len(values))
            total = total + sum(values) / (len(values) if reduction == "sequence_mean" else 1)
        divisor = {"token_mean": sum(sizes), "sequence_mean": 3}
        return total / (divisor[reduction] if isinstance(reduction, str) else 3 * 5)

    def actual(weights: Tensor, rollouts: list[Rollout]) -> Tensor:
        batch = advantages(rollouts)
        ids, mask = batch["input_ids"], valid_token_mask(batch["token_mask"], batch["sample_mask"])
        logprobs = weights[ids[:, :-1]].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        loss_fn = GRPOLossFn(ReinforceLoss(reduction=reduction, kl=None))
        counts = {
            "global_valid_seqs": num_trained_sequences(batch),
            "global_valid_tokens": mask.sum(),
        }
        halves = [batch.slice(0, 2), batch.slice(2, len(ids))]  # an episode is in both
        rows = logprobs.split([2, len(ids) - 2])
        losses = [loss_fn(row, half, **counts)[0] for row, half in zip(rows, halves, strict=True)]
        return torch.stack(losses).sum()

    gradients = []
    for function in (
        expected,
        lambda weights: actual(weights, split_by_turn(one_two_three())),
        lambda weights: actual(weights, one_two_three()),
    ):
        weights = table.clone().requires_grad_()
        function(weights).backward()
        gradients.append(weights.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients[2], gradients[0], rtol=1e-5, atol=1e-6)


def test_each_sample_ends_with_the_outcome_for_the_critic() -> None:
    """With gamma and lambda 1 a token's return is the episode's reward, as in one sample."""
    config = PPOConfig(kl=None, lam=1.0, gamma=1.0)
    results = []
    for rollouts in (split_by_turn(one_two_three()), one_two_three()):
        batch = grpo_batch(rollouts)
        batch["old_values"] = torch.full(batch["token_mask"].shape, 0.25)
        batch["last_values"] = torch.zeros(len(rollouts))
        columns = unwhitened_advantages(batch, config)
        mask = batch["token_mask"].bool()
        results.append([columns[name][mask].tolist() for name in ("advantages", "returns")])
    assert results[0] == results[1]
    assert results[0][1] == [4.0] + [1.0] * 9


def test_metrics_count_an_episode_once_and_each_sequence() -> None:
    samples = split_by_turn(one_two_three())
    metrics = rollout_metrics(grpo_batch(samples))
    assert metrics["reward"] == 2.0
    assert metrics["reward_std"] == pytest.approx(S)
    assert metrics["num_turns"] == 2.0
    assert metrics["completion_length"] == pytest.approx(10 / 6)
    failed = [replace(each, group=1).failed("lost") for each in samples[1:3]]
    assert failure_metrics([*samples, *failed]) == {
        "num_failed_rollouts": 1.0,
        "failed_fraction": 0.25,
    }
    refuse_too_many_failures([*samples, *failed], max_failed_fraction=0.25)
    with pytest.raises(RewardError, match="1 of 4 rollouts"):
        refuse_too_many_failures([*samples, *failed], max_failed_fraction=0.2)
    one_right = accuracy_metrics(RemoteRollouts.of([*samples, *failed]).episodes())
    assert one_right["unscored_fraction"] == 0.25
    assert one_right["mean_reward"] == 2.0


def test_rewards_of_one_episode_are_equal() -> None:
    samples = split_by_turn(one_two_three())
    samples[1] = samples[1].scored(0.5)
    with pytest.raises(
        RewardError, match=r"different rewards(.|\n)*0.5 for a sample of prompt 'p'"
    ):
        grpo_batch(samples)


def test_dynamic_sampling_keeps_whole_episodes() -> None:
    same = [
        replace(each, group=1)
        for each in split_by_turn([episode(0.0, 1.0), episode(1.0, sample=1)])
    ]
    draws = StepDraws(DynamicSampling(max_draws=2), GroupNormalized(), num_prompts=1)
    samples = [replace(each, components=()) for each in split_by_turn(one_two_three())]
    draws.add([*samples, *same])
    assert not draws.wants_more
    assert [(each.group, each.sample, each.part) for each in draws.rollouts()] == [
        *((0, 0, 0), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (0, 2, 2))
    ]
    assert draws.metrics()["reward"] == pytest.approx(8 / 5)
    assert draws.metrics()["zero_variance_fraction"] == 0.5
    by_turn = StepDraws(DynamicSampling(), GroupNormalized(credit="turn"), num_prompts=1)
    by_turn.add(same)  # the first turns have the return 1, and there is no other second one
    assert by_turn.wants_more
    by_turn.add(
        [*same, *[replace(each, group=1, sample=2) for each in split_by_turn([episode(1.0, 0.0)])]]
    )
    assert not by_turn.wants_more


class Counted:
    """A policy that notes the rows of each optimizer step."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def train(self, data: BatchedDataDict, loss_fn: Any) -> dict[str, float]:
        self.rows.append(data["episode_ids"].tolist())
        return {"loss": float(len(self.rows)), "num_valid_tokens": 1.0}


def test_optimizer_steps_take_episodes_with_all_their_samples() -> None:
    rollouts = [
        each
        for group in (0, 1)
        for each in one_two_three()
        for each in [replace(each, group=group)]
    ]
    batch = grpo_batch(split_by_turn(rollouts))
    assert num_trained_sequences(batch) == pytest.approx(6)
    for size, expected in {
        None: [[0, 1, 1, 2, 2, 2, 3, 4, 4, 5, 5, 5]],
        2: [[0, 1, 1], [2, 2, 2, 3], [4, 4, 5, 5, 5]],
        6: [[0, 1, 1, 2, 2, 2, 3, 4, 4, 5, 5, 5]],
    }.items():
        policy = Counted()
        metrics = train_in_parts(policy, batch, None, size=size, sequence_means=frozenset({"loss"}))
        assert policy.rows == expected
        assert num_parts(batch, size) == len(expected)
        assert metrics["loss"] == pytest.approx((len(expected) + 1) / 2)


def test_records_keep_the_samples_of_an_episode(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    samples = split_by_turn(one_two_three())
    records = RolloutRecords(tmp_path)
    records.save(1, samples)
    loaded = records.load(1)
    assert loaded == samples
    assert pickle.loads(pickle.dumps(RemoteRollouts.of(samples))) == samples  # noqa: S301
    assert (
        list(
            RemoteRollouts.joined([RemoteRollouts.of(samples[:1]), RemoteRollouts.of(samples[1:])])
        )
        == samples
    )
    assert listed(records).splitlines()[1].split() == ["1", "3", "0", "2", "3.3", "2.00"]
    assert "group 0, sample 2, part 1:" in shown(samples[4])
    table = pq.read_table(tmp_path / "step_000001.parquet").drop_columns("part")
    pq.write_table(table, tmp_path / "step_000002.parquet")
    assert [each.part for each in records.load(2)] == [0] * 6  # of an earlier version


def test_the_environment_adapts_the_reward_of_an_episode_once() -> None:
    class Halved:
        def global_post_process_and_metrics(self, batch: dict[str, Any]) -> Any:
            assert batch["rewards"].tolist() == [4.0, 1.0, 1.0]
            return {**batch, "rewards": batch["rewards"] / 2}, {"mean": 1.0}

    adapted, metrics = post_process_rollouts(Halved(), split_by_turn(one_two_three()))
    assert [each.reward for each in adapted] == [2.0, 0.5, 0.5, 0.5, 0.5, 0.5]
    assert metrics == {"mean": 1.0}


# Turns


def of_turns(
    rollouts: list[Rollout], kind: str = "group_centered", **values: Any
) -> list[list[float]]:
    """The advantages of the policy's tokens of each row."""
    batch = advantages(rollouts, advantage={"kind": kind, "credit": "turn"}, **values)
    assert (batch["advantages"][~batch["token_mask"].bool()] == 0).all()
    pairs = zip(batch["advantages"], batch["token_mask"].bool(), strict=True)
    return [row[mask].tolist() for row, mask in pairs]


R = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("kind", "turns", "expected"),
    [
        # returns 1, 0 and 1, 1: the first turns are equal
        ("group_centered", [(1, 0), (0, 1)], [[0, -0.5, -0.5], [0, 0.5, 0.5]]),
        ("leave_one_out", [(1, 0), (0, 1)], [[0, -1, -1], [0, 1, 1]]),
        ("group_normalized", [(1, 0), (0, 1)], [[0, -R, -R], [0, R, R]]),
        # returns 1.5, 1 and 0, 0
        ("group_centered", [(0.5, 1), (0, 0)], [[0.75, 0.5, 0.5], [-0.75, -0.5, -0.5]]),
        ("group_normalized", [(0.5, 1), (0, 0)], [[R, R, R], [-R, -R, -R]]),
        # returns 1; 2, 2; 1, 0, 0: nothing to compare the third turn with
        (
            "group_centered",
            [(1,), (0, 2), (1, 0, 0)],
            [[-1 / 3], [2 / 3, 1, 1], [-1 / 3, -1, -1, 0, 0, 0]],
        ),
    ],
)
def test_a_turn_is_compared_with_the_same_turn_of_the_group(kind, turns, expected) -> None:
    rollouts = [episode(*each, sample=sample) for sample, each in enumerate(turns)]
    actual = of_turns(rollouts, kind)
    for row, values in zip(actual, expected, strict=True):
        assert row == pytest.approx(values, abs=2e-6)
    samples = of_turns(split_by_turn(rollouts), kind)
    assert [*chain(*samples)] == [*chain(*actual)]  # also as one sample per turn


@pytest.mark.parametrize("is_split", [False, True])
def test_credit_by_turn_is_that_of_a_loop(is_split: bool) -> None:
    draw = random.Random(5)
    rollouts = [
        episode(
            *[draw.choice([0.0, 0.5, 1.0]) for _ in range(draw.randint(1, 4))], group=g, sample=s
        )
        for g in range(5)
        for s in range(4)
    ]
    expected = []
    for each in rollouts:
        for turn in range(len(each.turn_rewards)):
            others = [
                sum(other.turn_rewards[turn:])
                for other in rollouts
                if other.group == each.group and len(other.turn_rewards) > turn
            ]
            mean = sum(others) / len(others)
            expected += [sum(each.turn_rewards[turn:]) - mean] * (turn + 1)  # its tokens
    actual = [*chain(*of_turns(split_by_turn(rollouts) if is_split else rollouts))]
    assert actual == pytest.approx(expected, abs=1e-6)


def test_outcomes_at_the_end_of_equal_turns_are_those_of_episodes() -> None:
    rollouts = [episode(0.0, 0.0, reward, sample=n) for n, reward in enumerate((0.1, 0.7, 0.3))]
    for kind in ("group_normalized", "group_centered", "leave_one_out"):
        by_turn = advantages(rollouts, advantage={"kind": kind, "credit": "turn"})
        by_episode = advantages(rollouts, advantage={"kind": kind})
        assert torch.equal(by_turn["advantages"], by_episode["advantages"])


def test_what_changes_an_episodes_reward_belongs_to_all_of_its_turns() -> None:
    adapted = [replace(episode(1.0, 0.0), reward=3.0), episode(0.0, 1.0, sample=1)]
    assert of_turns(adapted) == [[1.0, 0.5, 0.5], [-1.0, -0.5, -0.5]]
    # 4 tokens of 8, with a buffer of 6: both lose a third of 0.6, so the differences stay
    punished = {"overlong": {"buffer_tokens": 6, "penalty": 0.6}}
    assert of_turns(adapted, **punished) == [
        pytest.approx(each, abs=1e-6) for each in ([1.0, 0.5, 0.5], [-1.0, -0.5, -0.5])
    ]
    # half a nat for each of 3 and 6 tokens
    longer = [episode(1.0, 0.0), episode(0.0, 1.0, 0.0, sample=1)]
    in_reward = {"loss": {"kl": {"place": "in_reward", "beta": 0.5, "kind": "k1"}}}
    first, second = 0.75, [0.75 - 0.5] * 2
    assert of_turns(longer, **in_reward) == [
        pytest.approx([first, *second], abs=1e-6),
        pytest.approx([-first, *(-each for each in second), 0, 0, 0], abs=1e-6),
    ]


def test_credit_by_turn_is_refused_where_it_has_no_meaning() -> None:
    credit = {"advantage": {"credit": "turn"}}
    assert GRPOConfig.model_validate(credit).advantage == GroupNormalized(credit="turn")
    assert GroupCentered().model_dump() == {"kind": "group_centered"}  # keys of the cache
    with pytest.raises(ValueError, match="gspo"):
        GRPOConfig.model_validate({"preset": "gspo", **credit})
    with pytest.raises(ConfigError, match=r"rewards of turns(.|\n)*'exact'"):
        GRPORecipe.model_validate({"grpo": credit}).refuse_contradictions()
    agent = {"kind": "agent", "target": "my_agent:run"}
    with pytest.raises(ConfigError, match="rewards of turns, but an agent has one"):
        GRPORecipe.model_validate({"grpo": credit, "environment": agent}).refuse_contradictions()
    GRPOSettings.model_validate({"grpo": credit})  # the environment may come from Python
    single = [replace(episode(1.0, sample=n), turn_rewards=()) for n in range(2)]
    with pytest.raises(RewardError, match="2 runs of the policy's tokens, 0 rewards"):
        of_turns(single)
    joined = replace(episode(1.0, 0.0).completion, generated=())
    with pytest.raises(RewardError, match=r"2 runs of the policy's tokens, 3 rewards"):
        of_turns([replace(episode(1.0, 0.0), completion=joined), episode(1.0, sample=1)])


def test_clipped_loss_reads_advantages_of_turns() -> None:
    batch = advantages(
        [episode(1.0, 0.0), episode(0.0, 1.0, sample=1)],
        advantage={"kind": "group_centered", "credit": "turn"},
    )
    mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
    logprobs = torch.zeros(mask.shape, requires_grad=True)
    loss, _ = GRPOLossFn(ClippedLoss(kl=None))(
        logprobs, batch, global_valid_seqs=torch.tensor(2.0), global_valid_tokens=mask.sum()
    )
    loss.backward()
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad, -batch["advantages"] / 6)
