"""Pairs as a batch, and pairs out of scores, by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.algorithms.dpo.data import (
    PairLogprobs,
    ScoredResponses,
    TokenizedPair,
    dpo_batch,
    pairs_from_rollouts,
    pairs_from_scores,
)
from nemo_rl_core.data.chat import SupervisedExample
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Completion, Prompt, Rollout


def example(*token_ids, num_prompt=1):
    num_trained = len(token_ids) - num_prompt
    return SupervisedExample(token_ids, (False,) * num_prompt + (True,) * num_trained)


def rollout(prompt_id, completion, reward, prompt_ids=(1, 1)):
    return Rollout(
        prompt=Prompt(id=prompt_id, text="?", token_ids=prompt_ids, answer="", task="t"),
        completion=Completion(completion, (0.0,) * len(completion), truncated=False),
        text="",
        reward=reward,
    )


def test_a_batch_by_hand():
    batch = dpo_batch(
        [
            TokenizedPair(
                example(1, 5, 2), example(1, 6, 7, 2), PairLogprobs((-0.5, -1), (-2, -3, -4))
            ),
            TokenizedPair(
                example(3, 3, 8, num_prompt=2),
                example(3, 3, 9, num_prompt=2),
                PairLogprobs((-5,), (-6,)),
            ),
        ]
    )
    assert batch["input_ids"].tolist() == [[1, 5, 2, 0], [1, 6, 7, 2], [3, 3, 8, 0], [3, 3, 9, 0]]
    assert batch["token_mask"].int().tolist() == [[1, 1, 0], [1, 1, 1], [0, 1, 0], [0, 1, 0]]
    assert batch["pair_ids"].tolist() == [0, 0, 1, 1]
    assert batch["is_chosen"].tolist() == [True, False, True, False]
    assert (batch["pair_ids"].dtype, batch["is_chosen"].dtype) == (torch.int64, torch.bool)
    assert batch["reference_logprobs"].tolist() == [
        [-0.5, -1, 0],
        [-2, -3, -4],
        [0, -5, 0],
        [0, -6, 0],
    ]
    assert batch.size == 4


def test_without_cached_logprobs_the_column_is_missing():
    assert "reference_logprobs" not in dpo_batch([TokenizedPair(example(1, 2), example(1, 3))])


def test_pairs_with_and_without_cached_logprobs_do_not_mix():
    bare = TokenizedPair(example(1, 2), example(1, 3))
    cached = TokenizedPair(bare.chosen, bare.rejected, PairLogprobs((-1,), (-1,)))
    with pytest.raises(DataError, match="others have not") as caught:
        dpo_batch([bare, cached, bare])
    assert caught.value.expected.startswith("3 pairs")
    assert caught.value.got == "1"


@pytest.mark.parametrize(
    ("logprobs", "words"),
    [
        (PairLogprobs((-1,), (-1, -1)), "rejected sequence of pair 1"),
        (PairLogprobs((), (-1,)), "chosen sequence of pair 1"),
    ],
)
def test_cached_logprobs_of_another_tokenization_are_refused(logprobs, words):
    good = TokenizedPair(example(1, 2), example(1, 3), PairLogprobs((-1,), (-1,)))
    bad = TokenizedPair(good.chosen, good.rejected, logprobs)
    with pytest.raises(DataError, match=words):
        dpo_batch([good, bad])


def test_best_against_worst_with_the_earlier_of_equals():
    a, b, c, d = (example(1, token) for token in (10, 11, 12, 13))
    group = ScoredResponses((a, b, c, d), (0.0, 1.0, 0.0, 1.0))
    assert pairs_from_scores([group], margin=0) == [TokenizedPair(chosen=b, rejected=a)]


def test_a_difference_of_the_margin_is_not_more_than_the_margin():
    a, b = example(1, 10), example(1, 11)
    groups = [ScoredResponses((a, b), (0.0, 0.5)), ScoredResponses((a, b), (0.0, 0.75))]
    assert len(pairs_from_scores(groups, margin=0.25)) == 2
    assert pairs_from_scores(groups, margin=0.5) == [TokenizedPair(chosen=b, rejected=a)]
    assert pairs_from_scores(groups, margin=0.75) == []


def test_groups_that_teach_nothing_give_no_pair():
    a, b = example(1, 10), example(1, 11)
    groups = [
        ScoredResponses((), ()),
        ScoredResponses((a,), (1.0,)),
        ScoredResponses((a, b), (1.0, 1.0)),
        ScoredResponses((a, a), (1.0, 0.0)),  # the same tokens, scored by chance
    ]
    assert pairs_from_scores(groups, margin=0) == []


def test_pairs_from_rollouts_by_hand():
    rollouts = [
        rollout("x", (5, 2), 0.0),
        rollout("y", (5, 2), 1.0, prompt_ids=(9,)),
        rollout("x", (6, 2), 1.0),
        rollout("x", (7, 2), None),  # not scored: neither good nor bad
        rollout("y", (8,), 0.5, prompt_ids=(9,)),
        rollout("z", (8,), 0.5, prompt_ids=(4,)),
    ]
    assert pairs_from_rollouts(rollouts, margin=0) == [
        TokenizedPair(example(1, 1, 6, 2, num_prompt=2), example(1, 1, 5, 2, num_prompt=2)),
        TokenizedPair(example(9, 5, 2), example(9, 8)),
    ]


def test_two_prompts_of_one_id_are_refused():
    with pytest.raises(DataError, match="two prompts have the id 'x'"):
        pairs_from_rollouts(
            [rollout("x", (5,), 0.0), rollout("x", (6,), 1.0, prompt_ids=(7,))], margin=0
        )


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=6), st.floats(0, 3))
def test_the_chosen_is_better_by_more_than_the_margin(scores, margin):
    examples = tuple(example(1, 10 + index) for index in range(len(scores)))
    pairs = pairs_from_scores([ScoredResponses(examples, tuple(scores))], margin=margin)
    by_tokens = {item.token_ids: score for item, score in zip(examples, scores, strict=True)}
    differences = [by_tokens[p.chosen.token_ids] - by_tokens[p.rejected.token_ids] for p in pairs]
    spread = max(scores) - min(scores)
    assert differences == ([spread] if spread > margin else [])
