"""Held rollouts against the same rollouts read here."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_rl_core.distributed.held_rows import HeldRows, InProcess
from nemo_rl_core.environments.interfaces import reads_rewards_alone
from nemo_rl_core.errors import RewardError
from nemo_rl_core.models.generation.where_made import HeldCompletions
from nemo_rl_core.rollouts.batch import (
    failed_rollouts,
    failure_metrics,
    groups_of,
    joined,
    mean_advantages,
    refuse_too_many_failures,
    rewards_of,
    rollout_batch,
    rollout_metrics,
    selected,
    valid_rollouts,
)
from nemo_rl_core.rollouts.held import HeldRollouts, HeldSource, SentPrompts
from nemo_rl_core.rollouts.records import load_rollouts, save_rollouts
from nemo_rl_core.rollouts.sampler import post_processed
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


def held() -> HeldRollouts:
    """`HERE`, of two engines, the second of which has made the third completion."""
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
    completions = HeldCompletions(
        input_lengths=np.array([4, 3, 4]),
        completion_lengths=np.array([2, 1, 3]),
        truncated=np.array([True, False, False]),
        tokens=HeldRows.of_blocks([InProcess(first), InProcess(second)], [2, 1]),
        texts=HeldRows.of_blocks(texts, [2, 1]).of_column("texts"),
    )
    places = np.array([0, 0, 1])
    return HeldRollouts(
        HeldSource(completions), np.arange(3), PROMPTS, places, places + 4, np.array([0, 1, 0])
    )


def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: HeldRows) -> None:
        raise AssertionError("nothing is to be fetched")

    monkeypatch.setattr(HeldRows, "fetched", refuse)


def test_as_a_sequence_they_are_the_rollouts() -> None:
    assert list(held()) == HERE
    assert [each.completion for each in held()] == [ONE, TWO, THREE]
    assert held()[-1] == HERE[2]
    assert list(held()[1:]) == HERE[1:]
    assert hash(held()[0].completion) == hash(ONE)


def test_a_batch_has_the_same_columns_once_it_is_fetched() -> None:
    ours = rollout_batch(held().with_outcomes([1.0, 0.0, 0.5]))
    rewards = (1.0, 0.0, 0.5)
    theirs = rollout_batch([each.scored(r) for each, r in zip(HERE, rewards, strict=True)])
    fetched = ours.fetched()
    assert set(fetched) == set(theirs)
    for name, column in theirs.items():
        assert fetched[name].dtype == column.dtype, name
        assert torch.equal(fetched[name], column), name
    assert rollout_metrics(ours) == rollout_metrics(theirs)


def test_no_token_is_fetched_to_learn_and_to_draw_again(monkeypatch: pytest.MonkeyPatch) -> None:
    unread(monkeypatch)
    scored = held().with_outcomes([1.0, RewardError("no number"), 0.5])
    again = joined([scored, held().with_outcomes([0.0, 0.0, 0.0])])
    assert isinstance(again, HeldRollouts)
    assert again.is_valid.tolist() == [True, False, True, True, True, True]
    chosen = selected(valid_rollouts(again), groups_of(valid_rollouts(again)) == 5)
    assert rewards_of(chosen).tolist() == [0.5, 0.0]
    assert failure_metrics(again)["num_failed_rollouts"] == 1
    assert len(failed_rollouts(again)) == 1
    assert rollout_batch(chosen)["input_lengths"].tolist() == [4, 4]
    assert again.num_tokens == 22


def test_joined_parts_keep_their_prompts_and_texts() -> None:
    scored = held().with_outcomes([1.0, RewardError("no number"), 0.5])
    again = list(joined([scored, scored[2:]]))
    assert again[:3] == list(scored)
    assert again[1].error is not None
    assert again[1].reward is None
    assert again[3] == HERE[2].scored(0.5)


def test_joined_parts_of_other_prompts_and_completions_keep_their_own() -> None:
    other = HeldRollouts(
        HeldSource(
            HeldCompletions(
                input_lengths=np.array([3]),
                completion_lengths=np.array([2]),
                truncated=np.array([True]),
                tokens=HeldRows.of_blocks(
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
                texts=HeldRows.of_blocks([InProcess({"texts": ["67"]})], [1]).of_column("texts"),
            )
        ),
        np.zeros(1, np.int64),
        (Prompt(id="c", text="3", token_ids=(1,), answer="z", task="sums"),),
        np.zeros(1, np.int64),
        np.array([9]),
        np.array([0]),
    )
    one = Completion((6, 7), (-4.0, -8.0), truncated=True)
    assert list(joined([held(), other, held()])) == [
        *HERE,
        Rollout(other.prompts[0], one, "67", group=9, sample=0),
        *HERE,
    ]


def test_a_failed_rollout_has_no_reward_in_a_batch() -> None:
    with pytest.raises(RewardError, match="could not be scored"):
        rewards_of(held().with_outcomes([1.0, RewardError("no number"), 0.5]))
    with pytest.raises(ValueError, match="has not been scored"):
        rewards_of(held())
    with pytest.raises(RewardError, match="no number"):
        failed = held().with_outcomes([RewardError("no number")] * 3)
        refuse_too_many_failures(failed, max_failed_fraction=0.5)


def test_components_come_from_a_scorer_that_has_several() -> None:
    parts = ((1.0, 0.0), (0.5, 0.5), (0.0, 2.0))
    scored = [
        replace(each, reward=sum(part), components=part)
        for each, part in zip(HERE, parts, strict=True)
    ]
    found = held().with_scores(scored)
    assert list(found) == scored
    assert rollout_batch(found[1:])["reward_components"].tolist() == [[0.5, 0.5], [0.0, 2.0]]


class Halved:
    @reads_rewards_alone
    def global_post_process_and_metrics(self, batch: dict) -> tuple[dict, dict[str, float]]:
        return {**batch, "rewards": batch["rewards"] / 2}, {"seen": float(len(batch["rewards"]))}


def test_an_environment_adapts_rewards_in_their_places() -> None:
    scored = held().with_outcomes([1.0, RewardError("no number"), 0.5])
    adapted, metrics = post_processed(Halved(), scored)
    assert isinstance(adapted, HeldRollouts)
    assert [each.reward for each in adapted] == [0.5, None, 0.25]
    assert metrics == {"seen": 2.0}


class Reads:
    def global_post_process_and_metrics(self, batch: dict) -> tuple[dict, dict[str, float]]:
        assert batch["completions"] == ["89", "3", "421"]
        tokens = (batch["input_ids"] * (batch["input_ids"] > 0)).sum()
        return batch, {"tokens": float(tokens)}


def test_an_environment_that_reads_tokens_gets_them() -> None:
    _, metrics = post_processed(Reads(), held().with_outcomes([1.0, 0.0, 0.5]))
    assert metrics == {"tokens": 5 + 6 + 8 + 9 + 5 + 6 + 3 + 7 + 4 + 2 + 1}


def test_records_are_read_back_as_they_were(tmp_path: Path) -> None:
    scored = held().with_outcomes([1.0, RewardError("no number"), 0.5])
    save_rollouts(scored, tmp_path / "step.parquet", advantages=torch.tensor([0.5, -0.5]))
    found = load_rollouts(tmp_path / "step.parquet")
    assert [each.advantage for each in found] == [0.5, None, -0.5]
    assert [replace(each, advantage=None) for each in found] == list(scored)


def test_what_is_sent_has_no_tokens_and_is_the_same_where_it_is_read() -> None:
    scored = held().with_outcomes([1.0, RewardError("no number"), 0.5])
    rows = scored.select(np.array([2, 1]))  # of both prompts, in another order
    for given in (scored, rows, scored[2:]):
        columns = given.__reduce__()[1]
        assert all(
            "token_ids" not in each.texts for each in columns if isinstance(each, SentPrompts)
        )
        assert list(copy.deepcopy(given)) == list(given)
    (sent,) = [each for each in scored[2:].__reduce__()[1] if isinstance(each, SentPrompts)]
    assert sent.texts["id"] == ["b"]  # no prompt without a rollout


def test_the_advantage_of_all_tokens_has_no_rounding_of_a_mean() -> None:
    """0.1 summed three times and divided by 3 is another number in float32."""
    ours = rollout_batch(held().with_outcomes([1.0, 0.0, 0.5]))
    theirs = ours.fetched()
    each = torch.tensor([0.1, -0.7, 0.3])
    ours["advantages"] = each
    theirs["advantages"] = each[:, None] * theirs["token_mask"]
    assert mean_advantages(ours).tolist() == mean_advantages(theirs).tolist() == each.tolist()
    theirs["advantages"][2, 1] = 0.6
    assert mean_advantages(theirs)[2].item() == pytest.approx(0.4)
