"""PPO's two losses: hand-computed values, micro-batches, NaN and settings."""

import math
import pickle
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from nemo_rl_core.algorithms.ppo.config import ClippedSurrogate, PPOConfig, PPOSchedule
from nemo_rl_core.algorithms.ppo.loss import PPOLossFn, ValueLossFn
from nemo_rl_core.functional.value import explained_variance
from tests.loss_checks import call_loss, check_gradient, check_microbatches, check_poison

NAN = math.nan
LN2 = math.log(2)
LOSSES = [PPOLossFn(ClippedSurrogate(clip_high=0.3)), ValueLossFn(0.3), ValueLossFn(None)]
COLUMNS = ("advantages", "prev_logprobs", "returns", "old_values")


run = partial(call_loss, reads="tokens")


def numbers(metrics):
    return {name: value.item() for name, value in metrics.items()}


def test_surrogate_by_hand():
    current = torch.tensor([[LN2, 0, NAN], [-LN2, NAN, LN2]], dtype=torch.float64)
    current.requires_grad_()
    batch = {
        "token_mask": torch.tensor([[1, 1, 0], [1, 0, 1]]),
        "sample_mask": torch.tensor([1, 1]),
        "advantages": torch.tensor([[1, 3, NAN], [-3, NAN, -2]], dtype=torch.float64),
        "prev_logprobs": torch.tensor([[0, 0, NAN], [0, NAN, 0]], dtype=torch.float64),
    }
    loss, metrics = run(PPOLossFn(ClippedSurrogate(clip_high=0.4)), current, batch)
    loss.backward()
    # r = 2, A = 1: max(-2, -1.4), clipped; r = 1, A = 3: -3, gradient -3
    # r = 1/2, A = -3: max(1.5, 2.4), clipped; r = 2, A = -2: max(4, 2.8), gradient 2 * 2
    assert loss.item() == pytest.approx((-1.4 - 3 + 2.4 + 4) / 4)
    expected = torch.tensor([[0, -3, 0], [0, 0, 4]], dtype=torch.float64) / 4
    torch.testing.assert_close(current.grad, expected)
    assert numbers(metrics) == pytest.approx(
        {
            "loss": loss.item(),
            "policy_kl": ((1 - LN2) + 0 + (-0.5 + LN2) + (1 - LN2)) / 4,
            "ratio_mean": (2 + 1 + 0.5 + 2) / 4,
            "approx_entropy": -(LN2 + 0 - LN2 + LN2) / 4,
            "clip_fraction_low": 1 / 4,
            "clip_fraction_high": 1 / 4,
        }
    )


def value_batch():
    """Valid tokens v = 0.5, 0.1, -0.5 with R = 1, 1, 1 and old values 0."""
    values = torch.tensor([[0.5, 0.1, NAN], [NAN, -0.5, NAN]], dtype=torch.float64)
    batch = {
        "token_mask": torch.tensor([[1, 1], [0, 1]]),
        "sample_mask": torch.tensor([1, 1]),
        "returns": torch.tensor([[1, 1], [NAN, 1]], dtype=torch.float64),
        "old_values": torch.tensor([[0, 0], [NAN, 0]], dtype=torch.float64),
    }
    return values.requires_grad_(), batch


def test_value_loss_by_hand():
    values, batch = value_batch()
    loss, metrics = run(ValueLossFn(0.2), values, batch)
    loss.backward()
    # 0.5 -> 0.2: max(0.25, 0.64), clipped; 0.1: 0.81; -0.5 -> -0.2: max(2.25, 1.44)
    assert loss.item() == pytest.approx(0.5 * (0.64 + 0.81 + 2.25) / 3)
    expected = torch.tensor([[0, -0.9, 0], [0, -1.5, 0]], dtype=torch.float64) / 3
    torch.testing.assert_close(values.grad, expected)
    assert numbers(metrics) == pytest.approx(
        {
            "value_loss": loss.item(),
            "value_mean": (0.5 + 0.1 - 0.5) / 3,
            "value_clip_fraction": 1 / 3,
            "return_mean": 1,
            "return_square": 1,
            "value_error_mean": (0.5 + 0.9 + 1.5) / 3,
            "value_error_square": (0.25 + 0.81 + 2.25) / 3,
        }
    )


def test_without_a_clip_old_values_are_not_read():
    values, batch = value_batch()
    del batch["old_values"]
    loss, metrics = run(ValueLossFn(None), values, batch)
    assert loss.item() == pytest.approx(0.5 * (0.25 + 0.81 + 2.25) / 3)
    assert metrics["value_clip_fraction"].item() == 0


def random_step(num_rows, width, seed):
    """Rows with `[B, T-1]` columns, and a first argument `[B, T]` that each loss cuts to size."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return 0.5 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    batch = {
        "token_mask": torch.rand(num_rows, width, generator=generator) < 0.7,
        "sample_mask": (torch.rand(num_rows, generator=generator) < 0.8).float(),
        **{name: normal(num_rows, width) for name in COLUMNS},
    }
    return normal(num_rows, width + 1), batch


steps = st.builds(random_step, st.integers(1, 5), st.integers(1, 4), st.integers(0, 10_000))


def first_argument(loss_fn, values):
    return values if isinstance(loss_fn, ValueLossFn) else values[:, :-1]


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_gradients(loss_fn):
    values, batch = random_step(3, 3, seed=1)
    check_gradient(partial(run, loss_fn), first_argument(loss_fn, values), batch)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(LOSSES), steps, st.data())
def test_microbatches_sum_to_the_step_in_loss_metrics_and_gradient(loss_fn, step, data):
    values, batch = step
    num_rows = len(values)
    owner = torch.tensor(
        data.draw(st.lists(st.integers(0, 2), min_size=num_rows, max_size=num_rows))
    )
    parts = [owner == part for part in range(3)]
    check_microbatches(partial(run, loss_fn), first_argument(loss_fn, values), batch, parts)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(LOSSES), steps, st.sampled_from([NAN, math.inf, -math.inf]))
def test_poison_at_masked_entries_changes_nothing(loss_fn, step, poison):
    values, batch = step
    mask = batch["token_mask"] & batch["sample_mask"].bool()[:, None]
    read = torch.cat([mask, mask.new_zeros(mask.shape[0], 1)], dim=1)
    dirty_batch = batch | {name: torch.where(mask, batch[name], poison) for name in COLUMNS}
    dirty_values = torch.where(read, values, poison)
    check_poison(
        partial(run, loss_fn),
        (first_argument(loss_fn, values), batch),
        (first_argument(loss_fn, dirty_values), dirty_batch),
        first_argument(loss_fn, read),
    )


def test_summed_metrics_give_the_explained_variance_of_the_step():
    values, batch = random_step(4, 3, seed=3)
    batch["sample_mask"] = torch.ones(4)
    mask = batch["token_mask"]
    _, metrics = run(ValueLossFn(), values, batch)
    errors = (batch["returns"] - values[:, :-1])[mask]
    expected = 1 - errors.var(correction=0) / batch["returns"][mask].var(correction=0)
    assert explained_variance(numbers(metrics)) == pytest.approx(expected.item())


def test_losses_are_picklable_and_have_defaults():
    for loss_fn in LOSSES:
        assert pickle.loads(pickle.dumps(loss_fn)) == loss_fn  # noqa: S301
    assert PPOLossFn().config == PPOConfig().loss
    assert ValueLossFn().value_clip == PPOConfig().critic.value_clip


def test_a_batch_must_divide_the_rollouts():
    sizes = {"num_prompts_per_step": 3, "num_generations_per_prompt": 2}
    assert PPOConfig(**sizes, train_global_batch_size=3).num_sequences_per_step == 6
    with pytest.raises(ValidationError, match=r"train_global_batch_size \(4\) must divide"):
        PPOConfig(**sizes, train_global_batch_size=4)


def test_an_iteration_does_not_know_how_many_follow():
    first, second = (
        PPOSchedule(num_iterations=number, critic={"value_clip": None}).iteration
        for number in (1, 7)
    )
    assert first == second
    assert type(first) is PPOConfig
    assert first.critic.value_clip is None
