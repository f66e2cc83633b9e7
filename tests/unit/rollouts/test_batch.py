"""Columns and metrics of a step's batch."""

import pytest
import torch

from nemo_rl_core.config.trainer import GateConfig
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.models.validation import check_consistency
from nemo_rl_core.rollouts.batch import mean_advantages, rollout_batch, rollout_metrics
from nemo_rl_core.types import Completion, Prompt, Rollout


def test_sequences_masked_by_the_gate_do_not_count_in_the_divergence() -> None:
    prompt = Prompt("0", "1=", (1,), "1", "sums")
    rollouts = [
        Rollout(prompt, Completion((5, 6), (-1.0, -1.0), truncated=False), "", reward=1.0)
        for _ in range(2)
    ]
    batch = rollout_batch(rollouts)
    # k3 of a gap of 0.02 nats is e^0.02 - 1 - 0.02; the other sequence is off by 3 nats per token.
    batch["prev_logprobs"] = batch["generation_logprobs"] + torch.tensor([[0.02], [3.0]])
    gate = GateConfig(max_masked_fraction=0.5)
    checked, consistency = check_consistency(batch, gate)
    assert consistency["num_inconsistent_sequences"] == 1
    metrics = rollout_metrics(checked)
    assert metrics["kl_generation_trainer"] == pytest.approx(2.0134e-4, rel=1e-2)
    # exp(prev - gen) of the same sequence
    assert metrics["sampling_importance_ratio"] == pytest.approx(1.0202, abs=1e-4)
    assert metrics["reward"] == 1.0


def test_the_columns_of_a_batch_by_hand() -> None:
    # The environment wrote the token 6 of the first, between the policy's 5 and 7.
    turns = Completion(
        (5, 6, 7),
        (-0.5, 0.0, -0.7),
        False,
        generated=(True, False, True),
        weight_versions=(3, 0, 4),
    )
    plain = Completion((8,), (-0.8,), True, weight_versions=(4,))
    batch = rollout_batch(
        [
            Rollout(Prompt("0", "1=", (1, 2), "1", ""), turns, "", reward=1.0),
            Rollout(Prompt("1", "2=", (3,), "2", ""), plain, "", reward=0.25),
        ]
    )
    assert batch["input_ids"].tolist() == [[1, 2, 5, 6, 7], [3, 8, 0, 0, 0]]
    assert batch["token_mask"].tolist() == [[False, True, False, True], [True, False, False, False]]
    expected = torch.tensor([[0.0, -0.5, 0.0, -0.7], [-0.8, 0.0, 0.0, 0.0]])
    assert torch.equal(batch["generation_logprobs"], expected)
    assert batch["weight_versions"].tolist() == [[0, 3, 0, 4], [4, 0, 0, 0]]
    assert batch["rewards"].tolist() == [1.0, 0.25]


def test_the_advantage_of_a_masked_sequence_is_0() -> None:
    batch = BatchedDataDict(
        {"advantages": torch.tensor([1.0, 2.0]), "sample_mask": torch.tensor([1.0, 0.0])}
    )
    assert mean_advantages(batch).tolist() == [1.0, 0.0]


def test_values_must_be_one_per_token() -> None:
    prompt = Prompt("0", "1=", (1,), "1", "")
    longer, shorter = Completion((5, 6), (-1.0,), False), Completion((5,), (-1.0, -2.0), False)
    with pytest.raises(ValueError, match="rollout 0: 2 tokens but 1 values"):
        rollout_batch([Rollout(prompt, each, "", reward=1.0) for each in (longer, shorter)])
