"""Agreement metrics between the rollout engine and the trainer."""

import math

import pytest
import torch

from nemo_rl_core.functional.kl import kl_generation_trainer
from nemo_rl_core.functional.policy_gradient import (
    band_weight,
    importance_weight,
    sampling_importance_ratio,
    sequence_importance_weight,
    sequence_mask_weight,
    truncated_weight,
)
from nemo_rl_core.models.validation.gate import sequence_mult_prob_error, token_mult_prob_error

METRICS = [
    token_mult_prob_error,
    sequence_mult_prob_error,
    sampling_importance_ratio,
    kl_generation_trainer,
]

# Factors prev/gen of the valid tokens: 2, 1/2, 4. The masked one would dominate.
GENERATION = torch.tensor([[0.25, 0.5, 0.9], [0.125, 0.9, 0.9]]).log()
TRAINER = torch.tensor([[0.5, 0.25, 1e-9], [0.5, 1e-9, 1e-9]]).log()
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()


def test_token_mult_prob_error_by_hand():
    # (2 + 2 + 4) / 3: a factor of 1/2 is as wrong as a factor of 2
    assert token_mult_prob_error(GENERATION, TRAINER, MASK).item() == pytest.approx(8 / 3)


def test_sequence_mult_prob_error_by_hand():
    result = sequence_mult_prob_error(GENERATION, TRAINER, MASK)
    assert result.tolist() == pytest.approx([2, 4])


def test_sampling_importance_ratio_by_hand():
    result = sampling_importance_ratio(GENERATION, TRAINER, MASK)
    assert result.item() == pytest.approx((2 + 0.5 + 4) / 3)


def test_kl_generation_trainer_by_hand():
    # d = prev - gen = ln 2, -ln 2, ln 4; k3 = e^d - 1 - d
    ln2 = math.log(2)
    expected = ((2 - 1 - ln2) + (0.5 - 1 + ln2) + (4 - 1 - 2 * ln2)) / 3
    result = kl_generation_trainer(GENERATION, TRAINER, MASK)
    assert result.item() == pytest.approx(expected, rel=1e-5)


def test_equal_logprobs_agree():
    assert [metric(TRAINER, TRAINER, MASK).max().item() for metric in METRICS] == [1, 1, 1, 0]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_tokens_do_not_leak(metric, poison):
    expected = metric(GENERATION, TRAINER, MASK)
    generation, trainer = GENERATION.clone(), TRAINER.clone()
    generation[~MASK] = poison
    assert torch.equal(metric(generation, trainer, MASK), expected)
    trainer[~MASK] = poison
    assert torch.equal(metric(generation, trainer, MASK), expected)


@pytest.mark.parametrize("metric", METRICS)
def test_a_nan_at_a_valid_token_is_not_hidden(metric):
    trainer = TRAINER.clone()
    trainer[0, 0] = math.nan
    assert metric(GENERATION, trainer, MASK).isnan().any()


def test_importance_weight_by_hand():
    trainer = TRAINER.clone().requires_grad_()
    weight = importance_weight(GENERATION, trainer)
    assert weight[MASK].tolist() == pytest.approx([2, 0.5, 4])
    assert not weight.requires_grad


def test_a_weight_that_is_not_finite_is_zero():
    generation = torch.tensor([-math.inf, math.nan, -1.0, -math.inf, 0.0])
    trainer = torch.tensor([-1.0, -1.0, math.nan, -math.inf, -math.inf])
    assert importance_weight(generation, trainer).tolist() == [0, 0, 0, 0, 0]


def test_sequence_importance_weight_is_the_geometric_mean():
    # sqrt(2 * 1/2) and 4, at every position of the row
    weight = sequence_importance_weight(GENERATION, TRAINER, MASK)
    assert weight[0].tolist() == pytest.approx([1, 1, 1])
    assert weight[1].tolist() == pytest.approx([4, 4, 4])


def test_one_bad_token_takes_the_weight_of_its_sequence():
    generation = GENERATION.clone()
    generation[0, 1] = -math.inf
    weight = sequence_importance_weight(generation, TRAINER, MASK)
    assert weight[0].tolist() == [0, 0, 0]
    assert weight[1].tolist() == pytest.approx([4, 4, 4])


def test_masked_tokens_do_not_reach_the_sequence_weight():
    generation = torch.where(MASK, GENERATION, math.nan)
    expected = sequence_importance_weight(GENERATION, TRAINER, MASK)
    assert torch.equal(sequence_importance_weight(generation, TRAINER, MASK), expected)


def test_corrections_by_hand():
    weight = torch.tensor([[0.4, 0.5, 2.0, 2.1], [0.4, 1.0, 1.0, 1.0]])
    assert truncated_weight(weight, cap=2)[0].tolist() == pytest.approx([0.4, 0.5, 2, 2])
    # both ends belong to the band
    assert band_weight(weight, low=0.5, high=2)[0].tolist() == [0, 0.5, 2, 0]
    by_sequence = torch.tensor([[2.5] * 4, [0.8] * 4])
    kept = sequence_mask_weight(weight, by_sequence, low=0.5, high=2)
    assert kept[0].tolist() == [0, 0, 0, 0]
    assert torch.equal(kept[1], weight[1])  # its first token, too
