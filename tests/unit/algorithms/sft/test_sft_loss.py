"""SFT loss: hand-computed values, micro-batches and NaN at masked tokens."""

import math
import pickle
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_core.algorithms.sft.loss import NLLLoss, SFTLossFn
from nemo_rl_core.functional.protocols import LossFunction
from tests.loss_checks import call_loss, check_microbatches

LOSS: LossFunction = NLLLoss()


def run(logprobs, token_mask, sample_mask, num_seqs, num_tokens):
    return LOSS(
        logprobs,
        {"token_mask": token_mask, "sample_mask": sample_mask},
        global_valid_seqs=torch.tensor(float(num_seqs)),
        global_valid_tokens=torch.tensor(float(num_tokens)),
    )


def test_value_and_gradient_by_hand():
    logprobs = torch.tensor([[-1.0, -2.0, -9.0], [-4.0, -9.0, -9.0]], requires_grad=True)
    token_mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    loss, metrics = run(logprobs, token_mask, torch.tensor([1, 1]), 2, 10)
    loss.backward()
    # (1 + 2 + 4) / 10 tokens in the full step, of which 3 are here
    assert loss.item() == pytest.approx(0.7)
    expected = torch.tensor([[-0.1, -0.1, 0.0], [-0.1, 0.0, 0.0]])
    torch.testing.assert_close(logprobs.grad, expected)
    assert metrics.keys() == {"loss"}
    assert metrics["loss"].item() == loss.item()
    assert not metrics["loss"].requires_grad


def test_a_masked_sample_does_not_count():
    logprobs = torch.tensor([[-1.0], [-4.0]], requires_grad=True)
    loss, _ = run(logprobs, torch.ones(2, 1), torch.tensor([1, 0]), 1, 1)
    loss.backward()
    assert loss.item() == 1
    assert logprobs.grad.tolist() == [[-1], [0]]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_poison_at_masked_tokens_does_not_leak(poison):
    logprobs = torch.tensor([[-1.0, poison], [poison, poison]], requires_grad=True)
    loss, _ = run(logprobs, torch.tensor([[1, 0], [1, 1]]), torch.tensor([1, 0]), 1, 1)
    loss.backward()
    assert loss.item() == 1
    assert logprobs.grad.tolist() == [[-1, 0], [0, 0]]


@settings(deadline=None)
@given(st.data())
def test_microbatches_sum_to_the_step(data):
    num_rows, width = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logprobs = -torch.rand(num_rows, width, generator=generator, dtype=torch.float64)
    batch = {
        "token_mask": torch.rand(num_rows, width, generator=generator) < 0.6,
        "sample_mask": torch.rand(num_rows, generator=generator) < 0.8,
    }
    owner = torch.tensor(
        data.draw(st.lists(st.integers(0, 2), min_size=num_rows, max_size=num_rows))
    )
    run_step = partial(call_loss, LOSS, reads="tokens")
    parts = [owner == part for part in range(3)]
    check_microbatches(run_step, logprobs, batch, parts, atol=1e-12, rtol=0)


def test_loss_is_picklable_and_has_its_alias():
    assert pickle.loads(pickle.dumps(LOSS)) == LOSS  # noqa: S301
    assert SFTLossFn is NLLLoss
