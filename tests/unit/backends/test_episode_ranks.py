"""Training samples of an episode on different ranks, compared with the episode on one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.algorithms.grpo.config import GRPOConfig
from nemo_rl_core.algorithms.grpo.data import add_advantages, grpo_batch, with_outcomes
from nemo_rl_core.algorithms.grpo.loss import GRPOLossFn
from nemo_rl_core.algorithms.grpo.loss_config import ClippedLoss, ConstantDenominator
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.process_group import rank, world_size
from nemo_rl_core.types import Rollout
from tests.episode_samples import split_by_turn
from tests.unit.algorithms.grpo.test_episode_samples import one_two_three

REDUCTIONS: list[Any] = [
    "token_mean",
    "sequence_mean",
    ConstantDenominator(kind="constant", max_tokens=5),
]


def trained(folder: Path, rollouts: list[Rollout]) -> list[tuple[dict[str, Any], float]]:
    """Returns the weights and the loss after two steps on a rank's rows, for each reduction."""
    config, results = GRPOConfig(num_generations_per_prompt=3), []
    batch = add_advantages(with_outcomes(grpo_batch(rollouts), config, max_new_tokens=9), config)
    # With two ranks the second and the third episode are on both.
    shard = batch.select_indices(range(rank(), batch.size, world_size()))
    for reduction in REDUCTIONS:
        backend = DTensorBackend()
        backend.setup(
            TrainingSetup(
                model_folder=folder,
                optimizer=OptimizerConfig(learning_rate=1e-2, adam_epsilon=1e-3),
                max_tokens_per_microbatch=24,
                training=DTensorTraining(),
            )
        )
        loss_fn = GRPOLossFn(ClippedLoss(kl=None, reduction=reduction), prev_is_current=True)
        losses = [backend.train_step(shard, loss_fn)["loss"] for _ in range(2)]
        weights = {name: tensor.clone() for name, tensor in backend.named_weights()}
        backend.shutdown()
        results.append((weights, losses[1]))
    return results


@pytest.mark.slow
def test_samples_of_an_episode_on_two_ranks_train_like_the_episode(tiny_model: Path) -> None:
    episodes = one_two_three()
    samples = split_by_turn(episodes)
    expected = trained(tiny_model, episodes)
    two_ranks = run_ranks(trained, tiny_model, samples, world_size=2)
    for actual in (trained(tiny_model, samples), *two_ranks):
        for (ours, our_loss), (theirs, their_loss) in zip(actual, expected, strict=True):
            assert our_loss == pytest.approx(their_loss, abs=1e-5)
            for name, tensor in theirs.items():
                torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-5, msg=name)
    assert expected[0][1] != pytest.approx(expected[1][1], abs=1e-3)
