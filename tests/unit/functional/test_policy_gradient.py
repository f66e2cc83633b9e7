"""Losses of single tokens, by hand and by finite differences."""

import math

import pytest
import torch

from nemo_rl_core.functional.policy_gradient import (
    cispo,
    clipped_surrogate,
    reinforce,
    sampled_entropy,
    sapo,
    sequence_ratio,
    token_ratio,
)

LN2 = math.log(2)


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


def gradient(function, *values):
    current = row(*values).requires_grad_()
    function(current).sum().backward()
    return current.grad[0].tolist()


def test_token_ratio_by_hand():
    # probabilities 1/2 -> 1/4 and 1/8 -> 1/4
    ratio = token_ratio(row(0.25, 0.25).log(), row(0.5, 0.125).log())
    assert ratio[0].tolist() == pytest.approx([0.5, 2])


def test_sequence_ratio_is_the_geometric_mean_of_valid_tokens():
    current = torch.tensor([[LN2, LN2, 9.0], [1.0, 2.0, 3.0]], dtype=torch.float64)
    previous = torch.tensor([[0.0, -2 * LN2, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    # ratios 2 and 8: sqrt(16) = 4; the second row has no valid token
    ratio = sequence_ratio(current, previous, mask)
    assert ratio[0].tolist() == pytest.approx([4, 4, 4])
    assert ratio[1].tolist() == [1, 1, 1]


def test_sequence_ratio_spreads_its_gradient_over_the_tokens():
    mask = torch.tensor([[True, True]])
    zeros = row(0, 0)
    # d/dcur_t of one entry = ratio / 2; two entries are summed
    assert gradient(lambda cur: sequence_ratio(cur, zeros, mask), LN2, LN2) == pytest.approx([2, 2])


def test_clipped_surrogate_by_hand():
    ratio, advantages = row(2, 0.5, 2, 0.5), row(1, 1, -1, -1)
    loss = clipped_surrogate(ratio, advantages, clip_low=0.2, clip_high=0.3)
    # max(-2, -1.3), max(-0.5, -0.8), max(2, 1.3), max(0.5, 0.8)
    assert loss[0].tolist() == pytest.approx([-1.3, -0.5, 2, 0.8])


def test_dual_clip_bounds_only_negative_advantages():
    ratio, advantages = row(5, 5, 1.1), row(2, -2, -2)
    loss = clipped_surrogate(ratio, advantages, clip_low=0.2, clip_high=0.2, dual_clip=3)
    # max(-10, -2.4); min(max(10, 2.4), 2 * 3); max(2.2, 2.2)
    assert loss[0].tolist() == pytest.approx([-2.4, 6, 2.2])


def test_dual_clip_takes_the_gradient_beyond_it():
    def loss(current):
        ratio = token_ratio(current, row(0, 0))
        return clipped_surrogate(ratio, row(-1, -1), clip_low=0.2, clip_high=0.2, dual_clip=3)

    # ratio 2: d(2)/dcur = 2; ratio 4 is beyond 3
    assert gradient(loss, LN2, 2 * LN2) == pytest.approx([2, 0])


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    def loss(current):
        ratio = token_ratio(current, row(0, 0))
        return cispo(current, ratio, row(3, -1), clip_low=0.2, clip_high=0.5)

    # -A * clip(r): -3 * clip(4) = -3 * 1.5; 1 * clip(1/2) = 0.8
    assert gradient(loss, 2 * LN2, -LN2) == pytest.approx([-4.5, 0.8])
    # times cur: -4.5 * 2 ln 2 and 0.8 * -ln 2
    assert loss(row(2 * LN2, -LN2))[0].tolist() == pytest.approx([-9 * LN2, -0.8 * LN2])


def test_the_weight_of_cispo_has_no_gradient_within_its_bounds_either():
    def loss(current):
        ratio = token_ratio(current, row(0))
        return cispo(current, ratio, row(3), clip_low=0.9, clip_high=9.0)

    # -3 * 2, without the derivative of the ratio.
    assert gradient(loss, LN2) == pytest.approx([-6])


def test_cispo_without_a_lower_bound():
    loss = cispo(row(-1), row(0.001), row(1), clip_low=1.0, clip_high=1.0)
    assert loss.item() == pytest.approx(0.001)


def test_reinforce_by_hand():
    assert reinforce(row(-2, -3), row(0.5, -1))[0].tolist() == [1, -3]
    assert gradient(lambda cur: reinforce(cur, row(0.5, -1)), -2, -3) == [-0.5, 1]


def test_sapo_by_hand():
    # r = 1: sigmoid(0) * 4 / tau = 2 / tau; A = 1 takes tau 1, A = -1 and A = 0 take tau 2
    loss = sapo(row(1, 1, 1), row(1, -1, 0), tau_positive=1.0, tau_negative=2.0)
    assert loss[0].tolist() == pytest.approx([-2, 1, 0])
    # r = 1 + ln 3, tau 1: sigmoid(ln 3) = 3/4, times 4
    loss = sapo(row(1 + math.log(3)), row(2), tau_positive=1.0, tau_negative=2.0)
    assert loss.item() == pytest.approx(-2 * 3)


def test_sapo_on_policy_has_the_gradient_of_the_surrogate():
    def loss(current):
        ratio = token_ratio(current, current.detach())
        return sapo(ratio, row(2, -3), tau_positive=1.0, tau_negative=1.05)

    assert gradient(loss, -1, -2) == pytest.approx([-2, 3])


def test_sampled_entropy_has_the_value_and_gradient_of_the_entropy_in_the_mean():
    logits = torch.tensor([0.3, -0.8, 1.1], dtype=torch.float64, requires_grad=True)
    current = torch.log_softmax(logits, -1)
    exact = -(current.exp() * current).sum()
    # The expectation over samples, with fixed probabilities, as in sampling.
    estimate = (current.detach().exp() * sampled_entropy(current[None])[0]).sum()
    torch.testing.assert_close(estimate, exact)
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (found,) = torch.autograd.grad(estimate, logits)
    torch.testing.assert_close(found, expected)


SMOOTH = {
    "token_ratio": lambda cur: token_ratio(cur, row(-1, -2, 0.5)),
    "sequence_ratio": lambda cur: sequence_ratio(
        cur, row(-1, -2, 0.5), torch.tensor([[True, False, True]])
    ),
    "clipped": lambda cur: clipped_surrogate(
        cur.exp(), row(1, -1, 2), clip_low=0.2, clip_high=0.2, dual_clip=2.0
    ),
    "reinforce": lambda cur: reinforce(cur, row(1, -1, 2)),
    "sapo": lambda cur: sapo(cur.exp(), row(1, -1, 2), tau_positive=1.3, tau_negative=2.0),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_equal_finite_differences(name):
    assert torch.autograd.gradcheck(SMOOTH[name], row(-0.1, 0.9, 0.05).requires_grad_())
