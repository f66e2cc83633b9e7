"""The gate between trainer and engine, on hand-computed numbers."""

import math

import pytest
import torch
from pydantic import ValidationError

from nemo_rl_core.config.trainer import GateConfig
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConsistencyError
from nemo_rl_core.functional.kl import kl_generation_trainer
from nemo_rl_core.functional.masked import valid_token_mask
from nemo_rl_core.functional.policy_gradient import sampling_importance_ratio
from nemo_rl_core.models.validation import (
    agreement,
    agreement_metrics,
    check_consistency,
)

GATE = GateConfig()
LENIENT = GateConfig(
    max_token_mult_prob_error=1e30, max_sequence_mult_prob_error=1e30, max_masked_fraction=0
)


def make_batch(gaps: list[list[float]]) -> BatchedDataDict:
    """Three positions per sequence, the first in the prompt; trainer = engine - gap elsewhere."""
    gap = torch.tensor(gaps)
    generated = torch.full(gap.shape, -1.0)
    return BatchedDataDict(
        {
            "generation_logprobs": generated,
            "prev_logprobs": generated - gap,
            "token_mask": torch.tensor([[False, True, True]] * len(gaps)),
            "sample_mask": torch.ones(len(gaps)),
        }
    )


def test_equal_logprobs_give_one_and_leave_the_batch_unchanged() -> None:
    batch = make_batch([[0, 0, 0]])
    same, metrics = check_consistency(batch, GATE)
    assert same is batch
    assert metrics == {"token_mult_prob_error": 1.0, "num_inconsistent_sequences": 0.0}


def test_the_mean_over_completion_tokens() -> None:
    # exp|ln 1.02| = 1.02 and exp|-ln 1.04| = 1.04 at two positions, 1 at two: (1.02+1.04+1+1)/4.
    # Values at the prompt's position are ignored.
    batch = make_batch([[9, math.log(1.02), 0], [9, 0, -math.log(1.04)]])
    _, metrics = check_consistency(batch, GATE)
    assert metrics["token_mult_prob_error"] == pytest.approx(1.015)


def test_gate_masks_and_counts_inconsistent_sequences() -> None:
    # Of 10 sequences the fourth is off by e^2 at one of two positions: (1 + 7.389) / 2 = 4.19 > 2.
    # The others, two of them a little off, make the mean: (16 + 2 * 1.01) / 18 = 1.0011.
    gaps = [[0.0, 0, 0] for _ in range(10)]
    gaps[3] = [0, 0, -2]
    gaps[5] = gaps[7] = [0, math.log(1.01), 0]
    batch = make_batch(gaps)
    gated, metrics = check_consistency(batch, GATE)
    assert gated["sample_mask"].tolist() == [1, 1, 1, 0, 1, 1, 1, 1, 1, 1]
    assert metrics["num_inconsistent_sequences"] == 1
    assert metrics["token_mult_prob_error"] == pytest.approx(1 + 2 * 0.01 / 18)
    assert torch.equal(gated["prev_logprobs"], batch["prev_logprobs"])
    assert batch["sample_mask"].tolist() == [1.0] * 10, "the batch that was given has changed"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bound", [1e30, math.inf])
def test_nan_is_masked_out_for_any_bound(bound: float, value: float) -> None:
    gate = GateConfig(
        max_token_mult_prob_error=bound, max_sequence_mult_prob_error=bound, max_masked_fraction=0.5
    )
    gated, metrics = check_consistency(make_batch([[0, value, 0.1], [0, 0, 0]]), gate)
    assert gated["sample_mask"].tolist() == [0, 1]
    assert gated["prev_logprobs"][0].tolist() == pytest.approx([-1, 0, -1.1])
    assert metrics == {"token_mult_prob_error": 1.0, "num_inconsistent_sequences": 1.0}


def test_sequences_already_masked_are_not_compared() -> None:
    batch = make_batch([[0, 9, 9], [0, 0, 0]])
    batch["sample_mask"] = torch.tensor([0.0, 1.0])
    same, metrics = check_consistency(batch, GATE)
    assert same is batch
    assert metrics["num_inconsistent_sequences"] == 0


def test_many_inconsistent_sequences_are_reported_as_stale_weights() -> None:
    # e^0.5 = 1.6487: both have (1 + 1.6487) / 2 = 1.324, below the bound of a sequence.
    with pytest.raises(ConsistencyError, match=r"token_mult_prob_error is 1\.324") as caught:
        check_consistency(make_batch([[0, 0.5, 0], [0, 0, -0.5]]), GATE)
    error = caught.value
    assert error.expected == "at most 1.05 (1 is agreement)"
    assert "100% of sequences past 1.05" in (error.got or "")
    assert "sequence 1 (1.324) at position 3: engine -1.0000, trainer -0.5000" in (error.got or "")
    assert "old weights" in (error.fix or "")
    assert len(str(error).splitlines()) < 10


def test_few_inconsistent_sequences_are_reported_as_numerics() -> None:
    # One of three at (1 + 1.6487) / 2 = 1.3244; the mean is (5 + 1.6487) / 6 = 1.108.
    with pytest.raises(ConsistencyError, match=r"token_mult_prob_error is 1\.108") as caught:
        check_consistency(make_batch([[0, 0, 0], [0, 0, 0.5], [0, 0, 0]]), GATE)
    error = caught.value
    assert "33% of sequences" in (error.got or "")
    # Bitwise identical sequences are not listed among the worst.
    assert (error.got or "").count("sequence ") == 1
    assert "numerics" in (error.fix or "")
    assert "max_token_mult_prob_error" in (error.fix or "")


def test_too_large_a_share_masked_stops_the_run() -> None:
    gaps = [[0.0, 0, 0] for _ in range(10)]
    gaps[2] = gaps[8] = [0, 3, 0]
    with pytest.raises(ConsistencyError, match="2 of 10 sequences exceed the bound") as caught:
        check_consistency(make_batch(gaps), GATE)
    assert caught.value.expected == "at most 10% past 2.0"
    assert "numerics" in (caught.value.fix or "")
    assert check_consistency(
        make_batch(gaps), GateConfig(max_masked_fraction=0.2)
    )[1]["num_inconsistent_sequences"] == 2  # fmt: skip


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_is_listed_as_the_worst(value: float) -> None:
    with pytest.raises(ConsistencyError) as caught:
        check_consistency(make_batch([[0, 0, 0], [0, value, 0], [0, 0, 0.1]]), LENIENT)
    assert "worst: sequence 1 (inf) at position 2" in (caught.value.got or "")


def test_nan_outside_the_mask_is_ignored() -> None:
    _, metrics = check_consistency(make_batch([[math.nan, 0, 0]]), GATE)
    assert metrics["token_mult_prob_error"] == 1.0


def test_the_sequence_bound_is_at_least_the_mean_bound() -> None:
    with pytest.raises(ValidationError, match="must not be below"):
        GateConfig(max_token_mult_prob_error=3.0)


def _close_batch() -> BatchedDataDict:
    generator = torch.Generator().manual_seed(0)
    batch = make_batch((0.02 * torch.randn(6, 3, generator=generator)).tolist())
    batch["sample_mask"][1] = 0
    batch["compared_mask"] = batch["sample_mask"].clone()
    batch["sample_mask"][4] = 0
    return batch


def test_one_rank_gives_bitwise_the_metrics_of_gate_and_step() -> None:
    batch = _close_batch()
    metrics = agreement_metrics([agreement(batch, GATE)], GATE)
    compared = BatchedDataDict({**batch, "sample_mask": batch["compared_mask"]})
    _, expected = check_consistency(compared, GATE)
    logprobs = batch["generation_logprobs"], batch["prev_logprobs"]
    mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
    assert metrics == {
        **expected,
        "kl_generation_trainer": float(kl_generation_trainer(*logprobs, mask)),
        "sampling_importance_ratio": float(sampling_importance_ratio(*logprobs, mask)),
    }


def test_several_ranks_give_the_metrics_of_one() -> None:
    batch = _close_batch()
    parts = [agreement(batch.slice(start, start + 2), GATE) for start in (0, 2, 4)]
    one = agreement_metrics([agreement(batch, GATE)], GATE)
    assert agreement_metrics(parts, GATE) == pytest.approx(one)


def test_only_tokens_of_the_trainers_weights_are_compared() -> None:
    batch = make_batch([[0, 9, 0], [0, 0, 9]])
    batch["compared_mask"] = batch["sample_mask"]
    batch["weight_versions"] = torch.tensor([[0, 4, 5], [0, 5, 3]])
    metrics = agreement_metrics([agreement(batch, GATE, version=5)], GATE)
    assert metrics is not None
    assert metrics["token_mult_prob_error"] == 1.0
    assert (metrics["staleness"], metrics["staleness_max"]) == (0.75, 2.0)
    assert agreement_metrics([agreement(batch, GATE)], GATE) is None


@pytest.mark.parametrize(
    "gaps",
    [
        [[0.0, 0, -9], *[[0.0, 0, 0]] * 9],
        [[0, math.log(1.2), math.log(1.2)]] * 4,
        [[0, math.nan, 0]],
    ],
)
def test_ranks_return_no_metrics_past_a_bound(gaps: list[list[float]]) -> None:
    """Covers a sequence above its bound, a mean above its bound, and NaN."""
    batch = make_batch(gaps)
    batch["compared_mask"] = batch["sample_mask"]
    assert agreement_metrics([agreement(batch, GATE)], GATE) is None
