"""Shaping of rewards, by hand."""

import math

import pytest
import torch

from nemo_rl_core.functional.rewards import outcome_rewards, overlong_penalty, returns_to_go

MASK = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]]).bool()


def test_overlong_penalty_by_hand():
    # limit 20, buffer 4: free up to 16, then a quarter of 0.8 a token
    lengths = torch.tensor([1, 16, 17, 18, 20])
    penalty = overlong_penalty(lengths, max_tokens=20, buffer_tokens=4, penalty=0.8)
    assert penalty.tolist() == pytest.approx([0, 0, -0.2, -0.4, -0.8])


def test_the_overlong_penalty_is_bounded():
    # DAPO, equation 13, third case: past the limit it stays at the penalty.
    lengths = torch.tensor([20, 25, 30])
    penalty = overlong_penalty(lengths, max_tokens=20, buffer_tokens=5, penalty=1.0)
    assert penalty.tolist() == [-1, -1, -1]


def test_a_buffer_as_long_as_the_completion_penalizes_every_token():
    penalty = overlong_penalty(torch.tensor([1, 4]), max_tokens=4, buffer_tokens=4, penalty=1.0)
    assert penalty.tolist() == pytest.approx([-0.25, -1])


@pytest.mark.parametrize("buffer_tokens", [0, 5])
def test_a_buffer_that_does_not_fit_is_refused(buffer_tokens):
    with pytest.raises(ValueError, match=rf"{buffer_tokens} tokens.*4 tokens"):
        overlong_penalty(torch.tensor([1]), max_tokens=4, buffer_tokens=buffer_tokens, penalty=1.0)


def test_outcomes_are_at_the_last_valid_token():
    rewards = outcome_rewards(torch.tensor([5.0, 7.0, math.nan]), MASK)
    assert rewards.tolist() == [[0, 0, 5, 0], [0, 0, 0, 7], [0, 0, 0, 0]]


def test_returns_to_go_by_hand():
    nan = math.nan
    rewards = torch.tensor([[nan, 1.0, 2.0, nan], [1.0, nan, 10.0, 100.0], [nan] * 4])
    # 1 + 2, 2; 1 + 10 + 100, 10 + 100, 100
    expected = [[0, 3, 2, 0], [111, 0, 110, 100], [0, 0, 0, 0]]
    assert returns_to_go(rewards, MASK).tolist() == expected
