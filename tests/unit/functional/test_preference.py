"""Preference losses by hand, and what distinguishes those that look alike."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.functional.preference import (
    hinge_loss,
    ipo_loss,
    kto_baseline,
    kto_loss,
    log_odds,
    pair_rows,
    robust_loss,
    sigmoid_loss,
)

LN3 = math.log(3)  # sigmoid(ln 3) = 3/4


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_pairs_are_found_in_any_order():
    ids = torch.tensor([70, -1, 70, 3, 3, -1])
    is_chosen = torch.tensor([0, 1, 1, 0, 1, 0])
    chosen, rejected, is_pair = pair_rows(ids, is_chosen)
    assert (chosen.tolist(), rejected.tolist()) == ([1, 4, 2], [5, 3, 0])
    assert is_pair.tolist() == [True, True, True]


@pytest.mark.parametrize(
    ("ids", "is_chosen"),
    [([1, 2], [1, 0]), ([1, 1], [1, 1]), ([1, 1], [0, 0])],
)
def test_rows_that_are_not_a_pair_are_reported(ids, is_chosen):
    assert pair_rows(torch.tensor(ids), torch.tensor(is_chosen))[2].tolist() == [False]


def test_an_odd_number_of_rows_is_refused():
    with pytest.raises(ValueError, match="even number of rows, got 3"):
        pair_rows(torch.tensor([0, 0, 1]), torch.tensor([1, 0, 1]))


def test_sigmoid_by_hand():
    # -ln 3/4, -ln 1/4, -ln 1/2
    expected = tensor(math.log(4 / 3), math.log(4), math.log(2))
    torch.testing.assert_close(sigmoid_loss(tensor(LN3, -LN3, 0)), expected)
    # 0.9 of the right label's loss and 0.1 of the wrong one's
    smoothed = 0.9 * math.log(4 / 3) + 0.1 * math.log(4)
    assert sigmoid_loss(tensor(LN3), label_smoothing=0.1).item() == pytest.approx(smoothed)


def test_robust_by_hand():
    expected = (0.9 * math.log(4 / 3) - 0.1 * math.log(4)) / 0.8
    assert robust_loss(tensor(LN3), label_smoothing=0.1).item() == pytest.approx(expected)


def test_large_margins_stay_finite():
    assert sigmoid_loss(tensor(-1e4, 1e4)).tolist() == [1e4, 0]
    assert robust_loss(tensor(-1e4), label_smoothing=0.1).item() == pytest.approx(0.9 * 1e4 / 0.8)


@given(st.floats(-20, 20), st.floats(0, 0.45))
def test_robust_is_unbiased_under_flipped_labels_and_smoothing_is_not(margin, rate):
    def mean_over_flips(loss):
        right, wrong = loss(tensor(margin, -margin), label_smoothing=rate).tolist()
        return (1 - rate) * right + rate * wrong

    clean = sigmoid_loss(tensor(margin)).item()
    assert mean_over_flips(robust_loss) == pytest.approx(clean, abs=1e-9)
    # Smoothing leaves (1 - r) ln(1 + e^-h) + r ln(1 + e^h) with r = 2 e (1 - e): off by r h.
    bias = 2 * rate * (1 - rate) * margin
    assert mean_over_flips(sigmoid_loss) == pytest.approx(clean + bias, abs=1e-9)


def test_smoothed_loss_is_minimal_at_the_labels_certainty():
    margin = torch.tensor(LN3, dtype=torch.float64, requires_grad=True)
    sigmoid_loss(margin, label_smoothing=0.25).backward()
    assert margin.grad.item() == pytest.approx(0, abs=1e-12)


def test_hinge_and_ipo_by_hand():
    assert hinge_loss(tensor(0.25, 2, -1)).tolist() == [0.75, 0, 2]
    # 1 / (2 * 0.25) = 2
    assert ipo_loss(tensor(0.5, 2, 3), beta=0.25).tolist() == [2.25, 0, 1]


def test_log_odds_by_hand():
    # p = 3/4: ln(3/4 / 1/4) = ln 3; p = 1/2: 0
    odds = log_odds(torch.log(tensor(0.75, 0.5)))
    torch.testing.assert_close(odds, tensor(LN3, 0), atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_odds_of_a_certain_sequence_are_finite(dtype):
    certain = torch.zeros(1, dtype=dtype, requires_grad=True)
    odds = log_odds(certain)
    odds.sum().backward()
    # p / (1 - p) is about 1 / eps
    assert odds.item() == pytest.approx(-math.log(torch.finfo(dtype).eps), rel=1e-3)
    assert certain.grad.item() == 0


def test_kto_by_hand():
    losses = kto_loss(
        tensor(LN3, LN3, -LN3),
        torch.tensor([True, False, False]),
        desirable_weight=2.0,
        undesirable_weight=4.0,
    )
    # 2 (1 - 3/4), 4 (1 - sigmoid(-ln 3)) = 4 * 3/4, 4 (1 - sigmoid(ln 3)) = 4 * 1/4
    torch.testing.assert_close(losses, tensor(0.5, 3, 1))


def test_kto_baseline_by_hand():
    ratios = tensor(1, 3, math.nan).requires_grad_()
    baseline = kto_baseline(ratios, torch.tensor([1, 1, 0]))
    assert baseline.tolist() == [2, 2, 2]
    assert not baseline.requires_grad
    assert kto_baseline(tensor(1, -3), torch.ones(2)).tolist() == [0, 0]  # mean -1
    assert kto_baseline(tensor(1, 1), torch.zeros(2)).tolist() == [0, 0]


@pytest.mark.parametrize(
    "loss",
    [
        sigmoid_loss,
        lambda h: sigmoid_loss(h, label_smoothing=0.2),
        lambda h: robust_loss(h, label_smoothing=0.2),
        hinge_loss,
        lambda h: ipo_loss(h, beta=0.3),
        lambda h: log_odds(-h.abs()),
        lambda h: kto_loss(h, h > 0, desirable_weight=1.5, undesirable_weight=0.5),
    ],
)
def test_gradients(loss):
    margins = tensor(-2.3, -0.4, 0.3, 1.7).requires_grad_()
    assert torch.autograd.gradcheck(loss, (margins,))
