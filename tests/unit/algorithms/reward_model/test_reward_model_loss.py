"""Bradley-Terry loss: hand-computed values, micro-batches, row order and NaN."""

import math
import pickle
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_core.algorithms.reward_model.config import BradleyTerryLoss, RewardModelConfig
from nemo_rl_core.algorithms.reward_model.loss import PreferenceLossFn
from tests.loss_checks import (
    call_loss,
    check_gradient,
    check_metrics_are_detached_scalars,
    check_microbatches,
    check_poison,
)

NAN = math.nan
CONFIGS = [BradleyTerryLoss(), BradleyTerryLoss(centering_coefficient=0.3)]


def run(config, scores, batch, step=None):
    return call_loss(PreferenceLossFn(config), scores, batch, reads="sequences", step=step)


def hand_batch():
    """Pair 4: s_c = 2, s_r = 0.5 (margin 1); pair 9: s_c = -1, s_r = 1 (margin 0); one masked."""
    n = NAN
    scores = [[n, 0.5, n], [n, n, -1], [2, n, n], [n, 1, n], [n, n, n], [n, n, n]]
    batch = {
        "input_lengths": torch.tensor([2, 3, 1, 2, 3, 3]),
        "sample_mask": torch.tensor([1, 1, 1, 1, 0, 0]),
        "pair_ids": torch.tensor([4, 9, 4, 9, 1, 1]),
        "is_chosen": torch.tensor([False, True, True, False, True, False]),
        "margins": torch.tensor([1, 0, 1, 0, n, n], dtype=torch.float64),
    }
    return torch.tensor(scores, dtype=torch.float64, requires_grad=True), batch


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_value_and_metrics_by_hand():
    scores, batch = hand_batch()
    loss, metrics = run(BradleyTerryLoss(), scores, batch)
    assert loss.item() == pytest.approx(-(math.log(sigmoid(1.5 - 1)) + math.log(sigmoid(-2))) / 2)
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {
            "loss": loss.item(),
            "accuracy": 1 / 2,
            "margin": (1.5 - 2) / 2,
            "chosen_score": (2 - 1) / 2,
            "rejected_score": (0.5 + 1) / 2,
        }
    )
    check_metrics_are_detached_scalars((loss, metrics))


def test_gradient_by_hand():
    scores, batch = hand_batch()
    run(BradleyTerryLoss(), scores, batch)[0].backward()
    # -sigmoid(-(d - margin)) / 2 pairs on the chosen's last token, the opposite on the rejected's
    four, nine = sigmoid(-0.5) / 2, sigmoid(2) / 2
    expected = [[0, four, 0], [0, 0, -nine], [-four, 0, 0], [0, nine, 0], [0] * 3, [0] * 3]
    torch.testing.assert_close(scores.grad, torch.tensor(expected, dtype=torch.float64))


def test_without_margins_and_with_centring_by_hand():
    scores, batch = hand_batch()
    del batch["margins"]
    loss, _ = run(BradleyTerryLoss(), scores, batch)
    plain = -(math.log(sigmoid(1.5)) + math.log(sigmoid(-2))) / 2
    assert loss.item() == pytest.approx(plain)
    centred, _ = run(BradleyTerryLoss(centering_coefficient=0.1), scores, batch)
    # (2 + 0.5)^2 and (-1 + 1)^2
    assert centred.item() == pytest.approx(plain + 0.1 * (6.25 + 0) / 2)


def test_the_first_loss_of_a_head_of_zeros_is_ln_2():
    _, batch = hand_batch()
    del batch["margins"]
    loss, metrics = run(BradleyTerryLoss(), torch.zeros(6, 3), batch)
    assert loss.item() == pytest.approx(math.log(2), abs=1e-6)
    assert metrics["accuracy"].item() == 0


def test_rows_of_one_id_that_are_not_a_pair_do_not_train_silently():
    scores, batch = hand_batch()
    assert run(BradleyTerryLoss(), scores[:2], {k: v[:2] for k, v in batch.items()})[0].isnan()


def random_step(num_pairs, width, seed):
    generator = torch.Generator().manual_seed(seed)
    num_rows = 2 * num_pairs
    order = torch.randperm(num_rows, generator=generator)
    valid = torch.rand(num_pairs, generator=generator) < 0.8
    margins = torch.rand(num_pairs, generator=generator, dtype=torch.float64)
    batch = {
        "input_lengths": torch.randint(1, width + 1, (num_rows,), generator=generator),
        "sample_mask": valid.repeat_interleave(2).float(),
        "pair_ids": 10 - 3 * torch.arange(num_pairs).repeat_interleave(2),
        "is_chosen": torch.tensor([True, False]).repeat(num_pairs),
        "margins": margins.repeat_interleave(2),
    }
    scores = torch.randn(num_rows, width, generator=generator, dtype=torch.float64)
    return scores, {name: value[order] for name, value in batch.items()}


steps = st.builds(random_step, st.integers(1, 5), st.integers(1, 4), st.integers(0, 10_000))


@pytest.mark.parametrize("config", CONFIGS)
def test_gradients(config):
    check_gradient(partial(run, config), *random_step(4, 3, seed=1))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(CONFIGS), steps, st.data())
def test_microbatches_of_complete_pairs_in_any_order_sum_to_the_step(config, step, data):
    scores, batch = step
    ids = batch["pair_ids"].unique().tolist()
    owners = data.draw(st.lists(st.integers(0, 2), min_size=len(ids), max_size=len(ids)))
    order = data.draw(st.permutations(range(len(scores))))
    rows = [
        [row for row in order if owners[ids.index(batch["pair_ids"][row])] == part]
        for part in range(3)
    ]
    parts = [torch.tensor(each, dtype=torch.long) for each in rows]
    check_microbatches(partial(run, config), scores, batch, parts)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(CONFIGS), steps, st.sampled_from([NAN, math.inf, -math.inf]))
def test_poison_at_all_but_the_last_valid_token_changes_nothing(config, step, poison):
    scores, batch = step
    is_valid = batch["sample_mask"].bool()
    read = torch.arange(scores.shape[1]) == batch["input_lengths"][:, None] - 1
    read &= is_valid[:, None]
    margins = torch.where(is_valid, batch["margins"], poison)
    dirty = torch.where(read, scores, poison), batch | {"margins": margins}
    check_poison(partial(run, config), step, dirty, read)


def test_loss_is_picklable_and_takes_the_config():
    config = RewardModelConfig(loss={"centering_coefficient": 0.01})
    loss_fn = PreferenceLossFn(config.loss)
    assert pickle.loads(pickle.dumps(loss_fn)) == loss_fn  # noqa: S301
    assert PreferenceLossFn().config == BradleyTerryLoss()
