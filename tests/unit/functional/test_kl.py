"""Divergence estimators against hand-computed values and exact expectations."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_core.functional.kl import kl_estimate, kl_penalty, score_function_weight

KINDS = ["k1", "k2", "k3"]


def value(kind, policy, reference):
    pair = (torch.tensor(number, dtype=torch.float64) for number in (policy, reference))
    return kl_estimate(*pair, kind=kind).item()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # policy ln(1/2), reference ln(1/4): d = -ln 2
        ("k1", math.log(2)),
        ("k2", math.log(2) ** 2 / 2),
        ("k3", 0.5 - 1 + math.log(2)),  # e^d = 1/2
    ],
)
def test_values_by_hand(kind, expected):
    assert value(kind, math.log(0.5), math.log(0.25)) == pytest.approx(expected, abs=1e-12)


def test_estimates_are_clamped_to_ten():
    # d = 30 -> clamped to 20: k1 -20, k2 200, k3 e^20 - 21, each then clamped
    assert [value(kind, -31.0, -1.0) for kind in KINDS] == [-10, 10, 10]
    # d = -30 -> -20: k1 20, k2 200, k3 e^-20 - 1 + 20 = 19.0
    assert [value(kind, -1.0, -31.0) for kind in KINDS] == [10, 10, 10]
    # An impossible token under either policy is finite too.
    assert [value(kind, -1.0, -math.inf) for kind in KINDS] == [10, 10, 10]
    assert [value(kind, -math.inf, -1.0) for kind in KINDS] == [-10, 10, 10]


def test_log_ratio_is_clamped_at_twenty_nats():
    # The outer bound hides the inner one in the value, but e^d must not overflow float32.
    result = kl_estimate(torch.tensor(-200.0), torch.tensor(0.0), kind="k3")
    assert result.item() == 10


def test_k3_keeps_its_digits_in_float32():
    policy, reference = torch.tensor(-1.0), torch.tensor(-1.0 + 2.0**-12)
    # d = 2^-12: d^2/2 + d^3/6 = 2.98e-8, below the rounding of exp(d) - 1 in float32
    expected = 2.0**-25 + 2.0**-36 / 6
    assert kl_estimate(policy, reference, kind="k3").item() == pytest.approx(expected, rel=1e-2)


@settings(deadline=None)
@given(st.floats(-50, 0), st.floats(-50, 0))
def test_signs_and_identity(policy, reference):
    assert value("k2", policy, reference) >= 0
    assert value("k3", policy, reference) >= 0
    assert value("k1", policy, reference) == -value("k1", reference, policy)
    assert all(value(kind, policy, policy) == 0 for kind in KINDS)


def test_score_function_weight_is_one_with_the_gradient_of_its_argument():
    current = torch.tensor([-1.0, -30.0], requires_grad=True)
    weight = score_function_weight(current)
    weight.sum().backward()
    assert weight.tolist() == [1, 1]
    assert current.grad.tolist() == [1, 1]


def distributions():
    logits = torch.tensor([0.3, -0.8, 1.1, 0.0], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([0.1, 0.4, 0.2, -0.9], dtype=torch.float64)
    return logits, torch.log_softmax(logits, -1), torch.log_softmax(other, -1)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_mean_value_is_that_of_the_divergence(kind):
    _, current, reference = distributions()
    exact = (current.exp() * (current - reference)).sum()
    mean = (current.exp() * kl_estimate(current, reference, kind=kind)).sum()
    torch.testing.assert_close(mean, exact)


def gradients(logits, reference, kind):
    """Gradients of the mean penalty over sampled tokens and of `KL(pi || ref)`."""
    current = torch.log_softmax(logits, -1)
    # The probabilities are fixed: samples have no gradient.
    penalty = (current.detach().exp() * kl_penalty(current, reference, kind=kind)).sum()
    exact = (current.exp() * (current - reference)).sum()
    return [torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (penalty, exact)]


@pytest.mark.parametrize("kind", KINDS)
def test_mean_gradient_is_that_of_the_divergence(kind):
    logits, _, reference = distributions()
    torch.testing.assert_close(*gradients(logits, reference, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("distance", [-15, -10, -5, -3, 3, 5, 10, 15])
def test_token_far_from_the_reference_moves_towards_it(kind, distance):
    # A vocabulary of three; the first token is e^distance times as likely in the reference.
    rare, usual = math.exp(-16), math.exp(-16 + abs(distance))
    current, reference = (
        torch.tensor([first, (1 - first) / 3, 2 * (1 - first) / 3], dtype=torch.float64).log()
        for first in ((rare, usual) if distance > 0 else (usual, rare))
    )
    assert (reference - current)[0].item() == pytest.approx(distance)
    logits = current.clone().requires_grad_()
    found, exact = gradients(logits, reference, kind)
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=0)
    current.requires_grad_()
    (of_token,) = torch.autograd.grad(kl_penalty(current, reference, kind=kind)[0], current)
    assert of_token.tolist() == pytest.approx([-distance, 0, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_descending_the_penalty_ends_at_the_reference(kind):
    # The case of math.md: two tokens are 35 times likelier in the reference.
    logits = torch.tensor([0.98, 0.01, 0.01], dtype=torch.float64).log().requires_grad_()
    reference = torch.tensor([0.3, 0.35, 0.35], dtype=torch.float64).log()
    for _ in range(2000):
        current = torch.log_softmax(logits, -1)
        penalty = (current.detach().exp() * kl_penalty(current, reference, kind=kind)).sum()
        (gradient,) = torch.autograd.grad(penalty, logits)
        logits = (logits - 0.05 * gradient).detach().requires_grad_()
    assert torch.softmax(logits, -1).tolist() == pytest.approx([0.3, 0.35, 0.35], abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_an_impossible_token_has_the_bound_of_the_log_ratio_as_gradient(kind):
    current = torch.tensor([-30.0, -1.0], requires_grad=True)
    reference = torch.tensor([-1.0, -math.inf])  # d = 29 and -inf, clamped to 20 and -20
    kl_penalty(current, reference, kind=kind).sum().backward()
    assert current.grad.tolist() == [-20, 20]


def test_without_the_weight_the_gradient_is_not_that_of_the_divergence():
    logits, current, reference = distributions()
    exact = (current.exp() * (current - reference)).sum()
    (exact_gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    mean = (current.detach().exp() * kl_estimate(current, reference, kind="k3")).sum()
    (gradient,) = torch.autograd.grad(mean, logits)
    assert (gradient - exact_gradient).abs().max() > 0.05
