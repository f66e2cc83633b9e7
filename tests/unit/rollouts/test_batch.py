"""The figures of a step's batch."""

import pytest
import torch

from nemo_rl_core.config.trainer import GateConfig
from nemo_rl_core.models.validation import check_consistency
from nemo_rl_core.rollouts.batch import rollout_batch, rollout_metrics
from nemo_rl_core.types import Completion, Prompt, Rollout


def test_sequences_that_the_gate_masks_do_not_enter_the_divergence() -> None:
    prompt = Prompt("0", "1=", (1,), "1", "sums")
    rollouts = [
        Rollout(prompt, Completion((5, 6), (-1.0, -1.0), truncated=False), "", reward=1.0)
        for _ in range(2)
    ]
    batch = rollout_batch(rollouts)
    # k3 of a gap of 0.02 nats is e^0.02 - 1 - 0.02; the other sequence is off by 3 nats a token.
    batch["prev_logprobs"] = batch["generation_logprobs"] + torch.tensor([[0.02], [3.0]])
    gate = GateConfig(max_masked_fraction=0.5)
    checked, consistency = check_consistency(batch, gate)
    assert consistency["num_inconsistent_sequences"] == 1
    metrics = rollout_metrics(checked)
    assert metrics["kl_generation_trainer"] == pytest.approx(2.0134e-4, rel=1e-2)
    # exp(prev - gen), likewise
    assert metrics["sampling_importance_ratio"] == pytest.approx(1.0202, abs=1e-4)
    assert metrics["reward"] == 1.0
