"""Pairs as a batch, and pairs from scores, with values computed by hand."""

from dataclasses import replace

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.data.loader import save_frame
from nemo_rl_core.data.loss_masks import SupervisedExample
from nemo_rl_core.data.pairs import (
    PreferencePair,
    load_pairs,
    pair_batch,
    pairs_from_rollouts,
    save_logprobs,
    save_pairs,
)
from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer
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


FIRST = PreferencePair(
    "a", example(1, 5, 2), example(1, 6, 7, 2), reference_logprobs=((-0.5, -1), (-2, -3, -4))
)
SECOND = PreferencePair(
    "b",
    example(3, 3, 8, num_prompt=2),
    example(3, 3, 9, num_prompt=2),
    margin=0.5,
    reference_logprobs=((-5,), (-6,)),
)


def bare(pair):
    return replace(pair, reference_logprobs=None)


def test_a_batch_by_hand():
    batch = pair_batch([FIRST, SECOND])
    assert batch["input_ids"].tolist() == [[1, 5, 2, 0], [1, 6, 7, 2], [3, 3, 8, 0], [3, 3, 9, 0]]
    assert batch["input_lengths"].tolist() == [3, 4, 3, 3]
    assert batch["token_mask"].int().tolist() == [[1, 1, 0], [1, 1, 1], [0, 1, 0], [0, 1, 0]]
    assert batch["pair_ids"].tolist() == [0, 0, 1, 1]
    assert batch["is_chosen"].tolist() == [True, False, True, False]
    assert (batch["pair_ids"].dtype, batch["is_chosen"].dtype) == (torch.int64, torch.bool)
    assert batch["margins"].tolist() == [0, 0, 0.5, 0.5]
    assert batch["reference_logprobs"].tolist() == [
        [-0.5, -1, 0],
        [-2, -3, -4],
        [0, -5, 0],
        [0, -6, 0],
    ]
    assert batch.size == 4


def test_without_cached_logprobs_the_column_is_missing():
    assert "reference_logprobs" not in pair_batch([bare(FIRST)])


def test_pairs_with_and_without_cached_logprobs_do_not_mix():
    with pytest.raises(DataError, match="others have none") as caught:
        pair_batch([bare(FIRST), SECOND, bare(SECOND)])
    assert caught.value.expected.startswith("3 pairs")
    assert caught.value.got == "1"


@pytest.mark.parametrize(
    ("logprobs", "words"),
    [
        (((-1,), (-1, -1)), "rejected sequence of pair 1"),
        (((), (-1,)), "chosen sequence of pair 1"),
    ],
)
def test_cached_logprobs_of_another_tokenization_are_refused(logprobs, words):
    with pytest.raises(DataError, match=words):
        pair_batch([FIRST, replace(SECOND, reference_logprobs=logprobs)])


def test_best_against_worst_with_the_earlier_of_equals():
    group = [rollout("x", (token,), reward) for token, reward in enumerate([0.0, 1.0, 0.0, 1.0])]
    (pair,) = pairs_from_rollouts(group, margin=0)
    assert (pair.chosen.token_ids, pair.rejected.token_ids) == ((1, 1, 1), (1, 1, 0))


def test_a_difference_of_the_margin_is_not_more_than_the_margin():
    group = [
        rollout("x", (5,), 0.0),
        rollout("x", (6,), 0.5),
        rollout("y", (5,), 0.0),
        rollout("y", (6,), 0.75),
    ]
    ids = [[pair.id for pair in pairs_from_rollouts(group, margin=m)] for m in (0.25, 0.5, 0.75)]
    assert ids == [["x", "y"], ["y"], []]


def test_groups_without_a_preference_give_no_pair():
    groups = [
        rollout("one", (5,), 1.0),
        rollout("equal", (5,), 1.0),
        rollout("equal", (6,), 1.0),
        rollout("same tokens, scored by chance", (5,), 1.0),
        rollout("same tokens, scored by chance", (5,), 0.0),
        rollout("unscored", (5,), None),
    ]
    assert pairs_from_rollouts(groups, margin=0) == []


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
        PreferencePair("x", example(1, 1, 6, 2, num_prompt=2), example(1, 1, 5, 2, num_prompt=2)),
        PreferencePair("y", example(9, 5, 2), example(9, 8)),
    ]


def test_turns_of_an_environment_are_not_trained_on():
    good, bad = rollout("x", (5, 9, 6), 1.0), rollout("x", (7,), 0.0)
    turns = replace(good.completion, generated=(True, False, True))
    (pair,) = pairs_from_rollouts([replace(good, completion=turns), bad], margin=0)
    assert pair.chosen.loss_mask == (False, False, True, False, True)


def test_two_prompts_of_one_id_are_refused():
    with pytest.raises(DataError, match="two prompts have the id 'x'"):
        pairs_from_rollouts(
            [rollout("x", (5,), 0.0), rollout("x", (6,), 1.0, prompt_ids=(7,))], margin=0
        )


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=6), st.floats(0, 3))
def test_the_chosen_is_better_by_more_than_the_margin(scores, margin):
    group = [rollout("x", (10 + index,), score) for index, score in enumerate(scores)]
    pairs = pairs_from_rollouts(group, margin=margin)
    differences = [
        scores[pair.chosen.token_ids[-1] - 10] - scores[pair.rejected.token_ids[-1] - 10]
        for pair in pairs
    ]
    spread = max(scores) - min(scores)
    assert differences == ([spread] if spread > margin else [])


def test_pairs_and_their_logprobs_come_back_from_the_disk(tmp_path):
    save_pairs([bare(FIRST), bare(SECOND)], tmp_path / "pairs")
    save_logprobs([FIRST, SECOND], tmp_path / "logprobs")
    # The tokenizer is for text; these are tokens.
    assert load_pairs(tmp_path / "pairs", None) == [bare(FIRST), bare(SECOND)]
    loaded = load_pairs(tmp_path / "pairs", None, reference_logprobs=tmp_path / "logprobs")
    assert loaded == [FIRST, SECOND]


def test_logprobs_of_other_pairs_are_refused(tmp_path):
    save_pairs([bare(FIRST), bare(SECOND)], tmp_path / "pairs")
    save_logprobs([SECOND, FIRST], tmp_path / "logprobs")
    with pytest.raises(DataError, match="belong to other pairs"):
        load_pairs(tmp_path / "pairs", None, reference_logprobs=tmp_path / "logprobs")


ROW = {"task": "sums", "metadata": "{}"}


def test_rows_of_another_kind_are_not_pairs(tmp_path):
    tokenizer = build_arithmetic_tokenizer()
    rows = [{"id": "1", "prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": 0.5} | ROW]
    save_frame(pd.DataFrame(rows), tmp_path / "text")
    (pair,) = load_pairs(tmp_path / "text", tokenizer)
    # Digit d is token 4 + d, plus is 14 and equals is 17, between <bos> (1) and <eos> (2).
    assert pair.chosen.token_ids == (1, 5, 14, 5, 17, 6, 2)
    assert pair.rejected.token_ids == (1, 5, 14, 5, 17, 7, 2)
    assert (pair.id, pair.margin) == ("1", 0.5)
    prompt = {"id": "1", "prompt": "1+1=", "answer": "2", "completion": "2"} | ROW
    save_frame(pd.DataFrame([prompt]), tmp_path / "prompts")
    with pytest.raises(DataError, match="no preference pairs"):
        load_pairs(tmp_path / "prompts", tokenizer)
