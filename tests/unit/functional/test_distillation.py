"""The divergence by hand, at equality, and far from it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_core.functional.distillation import kl_divergence, renormalized

logits = st.lists(st.floats(-30, 30), min_size=2, max_size=6)


def test_by_hand():
    p = torch.tensor([[0.5, 0.5], [0.9, 0.1]], dtype=torch.float64).log()
    q = torch.tensor([[0.75, 0.25], [0.1, 0.9]], dtype=torch.float64).log()
    first = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    second = 0.9 * math.log(9) - 0.1 * math.log(9)  # log-ratios of 2.2 nats: not near
    assert kl_divergence(p, q).tolist() == pytest.approx([first, second])


def test_renormalized_by_hand():
    topk = torch.tensor([0.3, 0.1], dtype=torch.float64).log()
    assert renormalized(topk).exp().tolist() == pytest.approx([0.75, 0.25])


@settings(deadline=None)
@given(logits, st.sampled_from([torch.float32, torch.float64]))
def test_exactly_zero_for_equals(values, dtype):
    p = renormalized(torch.tensor(values, dtype=dtype))
    assert kl_divergence(p, p).item() == 0


@settings(deadline=None, max_examples=300)
@given(logits, st.data(), st.sampled_from([1e-7, 1e-4, 1e-2, 1.0, 30.0]))
def test_never_negative_in_float32(values, data, scale):
    steps = data.draw(st.lists(st.floats(-1, 1), min_size=len(values), max_size=len(values)))
    p_logits = torch.tensor(values)
    p, q = renormalized(p_logits), renormalized(p_logits + scale * torch.tensor(steps))
    assert kl_divergence(p, q).item() >= 0
    # and it is the divergence: compared with the plain sum in float64
    exact_p, exact_q = p.double(), q.double()
    plain = (exact_p.exp() * (exact_p - exact_q)).sum().item()
    assert kl_divergence(p, q).item() == pytest.approx(plain, abs=1e-5, rel=1e-5)


def test_close_distributions_keep_their_digits_in_float32():
    # p = 1/2 (1, 1), q = 1/2 (1 + e, 1 - e): -ln(1 - e^2) / 2, about e^2 / 2 = 5e-9
    e = 1e-4
    p = torch.tensor([0.5, 0.5]).log()
    q = torch.tensor([math.log(0.5) + math.log1p(e), math.log(0.5) + math.log1p(-e)])
    assert kl_divergence(p, q).item() == pytest.approx(e * e / 2, rel=1e-2)


def test_far_apart_stays_finite_in_value_and_gradient():
    p = renormalized(torch.tensor([0.0, -200.0])).requires_grad_()
    q = renormalized(torch.tensor([-200.0, 0.0])).requires_grad_()
    value = kl_divergence(p, q)
    value.backward()
    assert value.item() == pytest.approx(200)
    assert p.grad.isfinite().all()
    assert q.grad.isfinite().all()


def test_gradients():
    generator = torch.Generator().manual_seed(0)
    p, q = (
        (3 * torch.randn(5, 4, generator=generator, dtype=torch.float64)).requires_grad_()
        for _ in range(2)
    )
    assert torch.autograd.gradcheck(
        lambda a, b: kl_divergence(renormalized(a), renormalized(b)), (p, q)
    )
