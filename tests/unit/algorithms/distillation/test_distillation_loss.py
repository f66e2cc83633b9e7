"""Distillation loss: hand-computed values, equality, micro-batches and NaN at masked entries."""

import math
import pickle
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from nemo_rl_core.algorithms.distillation.config import (
    DistillationConfig,
    ForwardKL,
    MixedKL,
    ReverseKL,
)
from nemo_rl_core.algorithms.distillation.loss import DistillationLossFn
from tests.loss_checks import call_loss, check_gradient, check_microbatches, check_poison

NAN = math.nan
KINDS = [ForwardKL(), ReverseKL(), MixedKL(weight=0.3)]
STUDENT = "current_topk_logprobs"
TOPK = ("topk_logprobs", STUDENT)
every_kind = pytest.mark.parametrize("config", KINDS, ids=lambda config: config.kind)


def run(config, logprobs, batch, step=None):
    return call_loss(DistillationLossFn(config), logprobs, batch, reads="tokens", step=step)


def hand_batch():
    """Two valid tokens, K = 2; teacher masses 0.8 and 1, student masses 0.5 and 0.4."""
    n = NAN
    teacher = [[[0.6, 0.2], [n, n]], [[0.5, 0.5], [n, n]], [[n, n], [n, n]]]
    student = [[[0.25, 0.25], [n, n]], [[0.3, 0.1], [n, n]], [[n, n], [n, n]]]
    batch = {
        "token_mask": torch.tensor([[1, 0], [1, 0], [1, 1]]),
        "sample_mask": torch.tensor([1, 1, 0]),
        "topk_logprobs": torch.tensor(teacher, dtype=torch.float64).log(),
        "current_topk_logprobs": torch.tensor(student, dtype=torch.float64).log(),
    }
    return torch.tensor([[-1, n], [-3, n], [n, n]], dtype=torch.float64), batch


# Renormalized: teacher (3/4, 1/4) against student (1/2, 1/2); then the other way round.
LOPSIDED = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
EVEN = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)


def test_forward_with_metrics_by_hand():
    loss, metrics = run(ForwardKL(), *hand_batch())
    assert loss.item() == pytest.approx((LOPSIDED + EVEN) / 2)
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {
            "loss": loss.item(),
            "forward_kl": (LOPSIDED + EVEN) / 2,
            "reverse_kl": (EVEN + LOPSIDED) / 2,
            "teacher_topk_mass": (0.8 + 1) / 2,
            "student_topk_mass": (0.5 + 0.4) / 2,
            "approx_entropy": (1 + 3) / 2,
        }
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ForwardKL(), LOPSIDED),
        (ReverseKL(), EVEN),
        (MixedKL(weight=0.3), 0.3 * LOPSIDED + 0.7 * EVEN),
        (MixedKL(weight=1), LOPSIDED),
        (MixedKL(weight=0), EVEN),
    ],
)
def test_each_kind_by_hand(config, expected):
    logprobs, batch = hand_batch()
    first = {name: values[:1] for name, values in batch.items()}
    assert run(config, logprobs[:1], first)[0].item() == pytest.approx(expected)


def test_forward_gradient_by_hand():
    logprobs, batch = hand_batch()
    student = batch["current_topk_logprobs"].requires_grad_()
    run(ForwardKL(), logprobs, batch)[0].backward()
    # p_S - p_T per token, over 2 tokens
    expected = torch.zeros(3, 2, 2, dtype=torch.float64)
    expected[0, 0] = torch.tensor([0.5 - 0.75, 0.5 - 0.25]) / 2
    expected[1, 0] = torch.tensor([0.75 - 0.5, 0.25 - 0.5]) / 2
    torch.testing.assert_close(student.grad, expected)


def random_step(num_rows, width, num_k, seed):
    generator = torch.Generator().manual_seed(seed)
    size = (num_rows, width)
    teacher, student = (
        torch.randn(*size, num_k + 3, generator=generator, dtype=torch.float64)
        .mul(2)
        .log_softmax(-1)[..., :num_k]  # K tokens of a larger vocabulary
        for _ in range(2)
    )
    batch = {
        "token_mask": torch.rand(*size, generator=generator) < 0.7,
        "sample_mask": (torch.rand(num_rows, generator=generator) < 0.8).float(),
        "topk_logprobs": teacher,
        "current_topk_logprobs": student,
    }
    return -torch.rand(*size, generator=generator, dtype=torch.float64), batch


steps = st.builds(
    random_step, st.integers(1, 5), st.integers(1, 4), st.integers(2, 5), st.integers(0, 10_000)
)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(KINDS), steps)
def test_zero_at_equality_and_never_negative(config, step):
    logprobs, batch = step
    assert run(config, logprobs, batch)[0].item() >= 0
    student = batch["topk_logprobs"].clone().requires_grad_()
    loss, _ = run(config, logprobs, batch | {"current_topk_logprobs": student})
    loss.backward()
    assert loss.item() == 0
    torch.testing.assert_close(student.grad, torch.zeros_like(student), atol=1e-12, rtol=0)


@every_kind
def test_never_negative_where_the_student_has_more_mass_on_the_tokens(config):
    _, batch = random_step(1, 1, 2, seed=0)
    # Without renormalizing, forward would be 0.2 ln(0.2 / 0.5) + 0.2 ln(0.2 / 0.4) = -0.32.
    batch["topk_logprobs"] = torch.tensor([[[0.2, 0.2]]]).log()
    batch["current_topk_logprobs"] = torch.tensor([[[0.5, 0.4]]]).log()
    batch["token_mask"], batch["sample_mask"] = torch.ones(1, 1), torch.ones(1)
    assert run(config, torch.zeros(1, 1), batch)[0].item() > 0


@every_kind
def test_gradients(config):
    check_gradient(partial(run, config), *random_step(3, 3, 4, seed=2), leaf=STUDENT)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.sampled_from(KINDS), steps, st.data())
def test_microbatches_sum_to_the_step_in_loss_metrics_and_gradient(config, step, data):
    num_rows = len(step[0])
    owner = torch.tensor(
        data.draw(st.lists(st.integers(0, 2), min_size=num_rows, max_size=num_rows))
    )
    parts = [owner == part for part in range(3)]
    check_microbatches(partial(run, config), *step, parts, leaf=STUDENT)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(KINDS), steps, st.sampled_from([NAN, math.inf, -math.inf]))
def test_poison_at_masked_entries_changes_nothing(config, step, poison):
    logprobs, batch = step
    mask = batch["token_mask"] & batch["sample_mask"].bool()[:, None]
    poisoned = {name: torch.where(mask[..., None], batch[name], poison) for name in TOPK}
    dirty = torch.where(mask, logprobs, poison), batch | poisoned
    check_poison(partial(run, config), step, dirty, mask, leaf=STUDENT)


def test_loss_is_picklable_and_takes_the_config():
    config = DistillationConfig(divergence={"kind": "mixed", "weight": 0.25})
    loss_fn = DistillationLossFn(config.divergence)
    assert loss_fn.config == MixedKL(weight=0.25)
    assert pickle.loads(pickle.dumps(loss_fn)) == loss_fn  # noqa: S301
    assert DistillationLossFn().config == ForwardKL()


@pytest.mark.parametrize(
    "settings_", [{"top_k": 1}, {"divergence": {"kind": "mixed", "weight": 1.5}}]
)
def test_wrong_settings_are_refused(settings_):
    # A single renormalized token has probability 1 for both models.
    with pytest.raises(ValidationError):
        DistillationConfig.model_validate(settings_)
