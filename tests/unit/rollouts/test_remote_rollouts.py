"""Compares remote rollouts with the same local ones."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_rl_core.distributed.batched_data_dict import InProcess, RemoteRows
from nemo_rl_core.environments.interfaces import reads_only_rewards
from nemo_rl_core.errors import RewardError
from nemo_rl_core.models.generation.remote_completions import RemoteCompletions
from nemo_rl_core.rollouts.batch import (
    failure_metrics,
    groups_of,
    mean_advantages,
    refuse_too_many_failures,
    rewards_of,
    rollout_batch,
    rollout_metrics,
    valid_rollouts,
)
from nemo_rl_core.rollouts.records import load_rollouts, save_rollouts
from nemo_rl_core.rollouts.remote_rollouts import CompletionSource, RemoteRollouts, SentPrompts
from nemo_rl_core.rollouts.sampler import post_process_rollouts
from nemo_rl_core.types import Completion, Prompt, Rollout

PROMPTS = (
    Prompt(id="a", text="1+", token_ids=(5, 6), answer="x", task="sums"),
    Prompt(id="b", text="2", token_ids=(7,), answer="y", task="sums"),
)
ONE = Completion((8, 9), (-0.5, -0.25), truncated=True)
TWO = Completion((3,), (-1.5,), truncated=False)
THREE = Completion((4, 2, 1), (-2.0, -0.125, -0.75), truncated=False)
HERE = [
    Rollout(PROMPTS[0], ONE, "89", group=4, sample=0),
    Rollout(PROMPTS[0], TWO, "3", group=4, sample=1),
    Rollout(PROMPTS[1], THREE, "421", group=5, sample=0),
]


def remote_rollouts() -> RemoteRollouts:
    """Returns `HERE` as rollouts of two engines; the second one generated the third completion."""
    first = {
        "input_ids": np.array([[5, 6, 8, 9], [5, 6, 3, 0]]),
        "token_mask": np.array([[False, True, True], [False, True, False]]),
        "generation_logprobs": np.array([[0, -0.5, -0.25], [0, -1.5, 0]], np.float32),
    }
    second = {
        "input_ids": np.array([[7, 4, 2, 1]]),
        "token_mask": np.array([[True, True, True]]),
        "generation_logprobs": np.array([[-2.0, -0.125, -0.75]], np.float32),
    }
    texts = [InProcess({"texts": ["89", "3"]}), InProcess({"texts": ["421"]})]
    completions = RemoteCompletions(
        input_lengths=np.array([4, 3, 4]),
        completion_lengths=np.array([2, 1, 3]),
        truncated=np.array([True, False, False]),
        tokens=RemoteRows.of_blocks([InProcess(first), InProcess(second)], [2, 1]),
        texts=RemoteRows.of_blocks(texts, [2, 1]).of_column("texts"),
    )
    prompt_index = np.array([0, 0, 1])
    return RemoteRollouts(
        CompletionSource(completions),
        np.arange(3),
        PROMPTS,
        prompt_index,
        prompt_index + 4,
        np.array([0, 1, 0]),
    )


def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: RemoteRows) -> None:
        raise AssertionError("nothing may be fetched")

    monkeypatch.setattr(RemoteRows, "fetched", refuse)


def test_remote_rollouts_are_a_sequence_of_rollouts() -> None:
    assert list(remote_rollouts()) == HERE
    assert [each.completion for each in remote_rollouts()] == [ONE, TWO, THREE]
    assert remote_rollouts()[-1] == HERE[2]
    assert list(remote_rollouts()[1:]) == HERE[1:]
    assert hash(remote_rollouts()[0].completion) == hash(ONE)
    for index in (3, -4):
        with pytest.raises(IndexError):
            remote_rollouts()[index]


def test_a_fetched_batch_has_the_same_columns() -> None:
    ours = rollout_batch(remote_rollouts().with_outcomes([1.0, 0.0, 0.5]))
    rewards = (1.0, 0.0, 0.5)
    theirs = rollout_batch([each.scored(r) for each, r in zip(HERE, rewards, strict=True)])
    fetched = ours.fetched()
    assert set(fetched) == set(theirs)
    for name, column in theirs.items():
        assert fetched[name].dtype == column.dtype, name
        assert torch.equal(fetched[name], column), name
    assert rollout_metrics(ours) == rollout_metrics(theirs)


def test_no_token_is_fetched_for_training_or_further_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    unread(monkeypatch)
    scored = remote_rollouts().with_outcomes([1.0, RewardError("no number"), 0.5])
    again = RemoteRollouts.joined([scored, remote_rollouts().with_outcomes([0.0, 0.0, 0.0])])
    assert isinstance(again, RemoteRollouts)
    assert again.is_valid.tolist() == [True, False, True, True, True, True]
    valid = valid_rollouts(again)
    chosen = valid.select(np.flatnonzero(groups_of(valid) == 5))
    assert rewards_of(chosen).tolist() == [0.5, 0.0]
    assert failure_metrics(again)["num_failed_rollouts"] == 1
    assert np.flatnonzero(~again.is_valid).tolist() == [1]
    assert rollout_batch(chosen)["input_lengths"].tolist() == [4, 4]
    assert again.num_tokens == 22


def test_joined_parts_keep_their_prompts_and_texts() -> None:
    scored = remote_rollouts().with_outcomes([1.0, RewardError("no number"), 0.5])
    again = list(RemoteRollouts.joined([scored, scored[2:]]))
    assert again[:3] == list(scored)
    assert again[1].error is not None
    assert again[1].reward is None
    assert again[3] == HERE[2].scored(0.5)


def test_joined_parts_keep_different_prompts_and_completions() -> None:
    other = RemoteRollouts(
        CompletionSource(
            RemoteCompletions(
                input_lengths=np.array([3]),
                completion_lengths=np.array([2]),
                truncated=np.array([True]),
                tokens=RemoteRows.of_blocks(
                    [
                        InProcess(
                            {
                                "input_ids": np.array([[1, 6, 7]]),
                                "token_mask": np.array([[True, True]]),
                                "generation_logprobs": np.array([[-4.0, -8.0]], np.float32),
                            }
                        )
                    ],
                    [1],
                ),
                texts=RemoteRows.of_blocks([InProcess({"texts": ["67"]})], [1]).of_column("texts"),
            )
        ),
        np.zeros(1, np.int64),
        (Prompt(id="c", text="3", token_ids=(1,), answer="z", task="sums"),),
        np.zeros(1, np.int64),
        np.array([9]),
        np.array([0]),
    )
    one = Completion((6, 7), (-4.0, -8.0), truncated=True)
    assert list(RemoteRollouts.joined([remote_rollouts(), other, remote_rollouts()])) == [
        *HERE,
        Rollout(other.prompts[0], one, "67", group=9, sample=0),
        *HERE,
    ]


def test_rollouts_with_and_without_rewards_are_joined() -> None:
    scored = remote_rollouts().with_outcomes([1.0, 0.0, 0.5])
    again = RemoteRollouts.joined([scored, remote_rollouts()])
    assert [each.reward for each in again] == [1.0, 0.0, 0.5, None, None, None]


def test_a_failed_rollout_of_a_list_keeps_its_messages() -> None:
    failed = replace(HERE[0].failed("no reply"), messages=({"role": "user", "content": "1+"},))
    assert RemoteRollouts.of([failed]) == [failed]


def test_joined_errors_stay_with_their_rollouts() -> None:
    failed = remote_rollouts().with_outcomes([1.0, RewardError("no number"), 0.5])
    again = RemoteRollouts.joined([remote_rollouts().with_outcomes([0.0, 0.0, 0.0]), failed])
    assert [each.error is None for each in again] == [True, True, True, True, False, True]


def test_scores_of_valid_rollouts_return_to_their_rows() -> None:
    failed = replace(remote_rollouts(), errors={0: "the turn failed"})
    scored = failed.with_scored(failed.valid().with_outcomes([1.0, 0.5]))
    assert scored.rewards is not None
    assert np.isnan(scored.rewards[0])
    assert scored.rewards[1:].tolist() == [1.0, 0.5]


def test_a_failed_rollout_has_no_reward_in_a_batch() -> None:
    with pytest.raises(RewardError, match="could not be scored"):
        rewards_of(remote_rollouts().with_outcomes([1.0, RewardError("no number"), 0.5]))
    with pytest.raises(ValueError, match="has not been scored"):
        rewards_of(remote_rollouts())
    with pytest.raises(RewardError, match="no number"):
        failed = remote_rollouts().with_outcomes([RewardError("no number")] * 3)
        refuse_too_many_failures(failed, max_failed_fraction=0.5)


def test_components_come_from_a_scorer_with_several_rewards() -> None:
    parts = ((1.0, 0.0), (0.5, 0.5), (0.0, 2.0))
    scored = [
        replace(each, reward=sum(part), components=part)
        for each, part in zip(HERE, parts, strict=True)
    ]
    loaded = remote_rollouts().with_scores(scored)
    assert list(loaded) == scored
    assert rollout_batch(loaded[1:])["reward_components"].tolist() == [[0.5, 0.5], [0.0, 2.0]]


class Halved:
    @reads_only_rewards
    def global_post_process_and_metrics(self, batch: dict) -> tuple[dict, dict[str, float]]:
        return {**batch, "rewards": batch["rewards"] / 2}, {"seen": float(len(batch["rewards"]))}


def test_rewards_changed_by_an_environment_keep_their_positions() -> None:
    scored = remote_rollouts().with_outcomes([1.0, RewardError("no number"), 0.5])
    adapted, metrics = post_process_rollouts(Halved(), scored)
    assert isinstance(adapted, RemoteRollouts)
    assert [each.reward for each in adapted] == [0.5, None, 0.25]
    assert metrics == {"seen": 2.0}


class Reads:
    def global_post_process_and_metrics(self, batch: dict) -> tuple[dict, dict[str, float]]:
        assert batch["completions"] == ["89", "3", "421"]
        tokens = (batch["input_ids"] * (batch["input_ids"] > 0)).sum()
        return batch, {"tokens": float(tokens)}


def test_an_environment_that_reads_tokens_gets_them() -> None:
    _, metrics = post_process_rollouts(Reads(), remote_rollouts().with_outcomes([1.0, 0.0, 0.5]))
    assert metrics == {"tokens": 5 + 6 + 8 + 9 + 5 + 6 + 3 + 7 + 4 + 2 + 1}


def test_records_are_read_back_equal(tmp_path: Path) -> None:
    scored = remote_rollouts().with_outcomes([1.0, RewardError("no number"), 0.5])
    save_rollouts(scored, tmp_path / "step.parquet", advantages=torch.tensor([0.5, -0.5]))
    loaded = load_rollouts(tmp_path / "step.parquet")
    assert [each.advantage for each in loaded] == [0.5, None, -0.5]
    assert [replace(each, advantage=None) for each in loaded] == list(scored)


def test_pickled_rollouts_have_no_tokens_and_are_equal_afterwards() -> None:
    scored = remote_rollouts().with_outcomes([1.0, RewardError("no number"), 0.5])
    rows = scored.select(np.array([2, 1]))  # of both prompts, in another order
    for rollouts in (scored, rows, scored[2:]):
        columns = rollouts.__reduce__()[1]
        assert all(
            "token_ids" not in each.texts for each in columns if isinstance(each, SentPrompts)
        )
        assert list(copy.deepcopy(rollouts)) == list(rollouts)
    (sent,) = [each for each in scored[2:].__reduce__()[1] if isinstance(each, SentPrompts)]
    assert sent.texts["id"] == ["b"]  # no prompt without a rollout


def test_a_constant_advantage_is_not_rounded_by_a_mean() -> None:
    """In float32, 0.1 summed three times and divided by 3 is not 0.1."""
    ours = rollout_batch(remote_rollouts().with_outcomes([1.0, 0.0, 0.5]))
    theirs = ours.fetched()
    each = torch.tensor([0.1, -0.7, 0.3])
    ours["advantages"] = each
    theirs["advantages"] = each[:, None] * theirs["token_mask"]
    assert mean_advantages(ours).tolist() == mean_advantages(theirs).tolist() == each.tolist()
    theirs["advantages"][2, 1] = 0.6
    assert mean_advantages(theirs)[2].item() == pytest.approx(0.4)
