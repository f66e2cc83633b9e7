"""Group-relative policy optimization (GRPO, arXiv:2402.03300): the loop, as the paper has it."""

from contextlib import ExitStack
from dataclasses import replace

import torch

from nemo_rl_core.algorithms.grpo.config import GRPOConfig, GRPOSettings
from nemo_rl_core.algorithms.grpo.data import grpo_batch, rollout_rows, save_rollouts
from nemo_rl_core.algorithms.grpo.loss import GRPOLossFn
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.functional.advantages import zero_variance_fraction
from nemo_rl_core.functional.importance import kl_generation_trainer
from nemo_rl_core.models.validation import check_consistency
from nemo_rl_core.trainers.base import Job
from nemo_rl_core.trainers.rollouts import RolloutTrainer
from nemo_rl_core.types import Prompt, Rollout


class GRPOTrainer(RolloutTrainer[GRPOSettings, GRPOConfig]):
    """Rolls out, scores, and trains on one cluster, trainer and engine taking turns."""

    algorithm = "grpo"
    settings_class = GRPOSettings

    def _stage(self, job: Job) -> str:
        return f"grpo_iteration {job.iteration}"

    def _set_up(self, job: Job, resources: ExitStack) -> None:
        super()._set_up(job, resources)
        self._loss = GRPOLossFn(self.config.loss)
        self._rollouts = job.work / "rollouts"

    def _train_step(self, batch: list[Prompt]) -> dict[str, float]:
        rollouts = self._roll_out(batch)
        data = grpo_batch(
            rollouts,
            num_generations_per_prompt=self.config.num_generations_per_prompt,
            advantage=self.config.advantage,
        )
        with self.timer.phase("logprobs"):
            self._add_logprobs(data)
        error = check_consistency(data, bound=self.config.gate.max_token_mult_prob_error)
        with self.timer.phase("train"):
            trained = self._train(data)
        rows = rollout_rows(rollouts, data["advantages"])
        save_rollouts(rows, self._rollouts / f"step_{self.step:06d}.parquet")
        return {"token_mult_prob_error": error, **_health(data, rollouts), **trained}

    def _training_setup(self, job: Job) -> TrainingSetup:
        return replace(
            super()._training_setup(job),
            # The policy is the distribution that was sampled from, so under its temperature.
            temperature=self.settings.generation.temperature,
            reference_folder=job.reference if self.config.loss.kl else None,
        )

    def _add_logprobs(self, batch: BatchedDataDict) -> None:
        batch["prev_logprobs"] = self.policy.get_logprobs(batch)["logprobs"]
        if self.config.loss.kl:
            reference = self.policy.get_reference_logprobs(batch)
            batch["reference_logprobs"] = reference["logprobs"]

    def _train(self, batch: BatchedDataDict) -> dict[str, float]:
        """Optimizer steps over consecutive parts of the batch; metrics are their means."""
        size = self.config.train_global_batch_size or batch.size
        parts = [
            self.policy.train(batch.slice(start, start + size), self._loss)
            for start in range(0, batch.size, size)
        ]
        means = {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
        return {**means, "num_valid_tokens": sum(part["num_valid_tokens"] for part in parts)}


def _health(batch: BatchedDataDict, rollouts: list[Rollout]) -> dict[str, float]:
    lengths = torch.tensor([float(len(rollout.completion.token_ids)) for rollout in rollouts])
    rewards = batch["rewards"]
    logprobs = (batch["generation_logprobs"], batch["prev_logprobs"], batch["token_mask"])
    return {
        "reward": rewards.mean().item(),
        "reward_std": rewards.std().item(),
        "zero_variance_fraction": float(zero_variance_fraction(rewards, batch["group_ids"])),
        "kl_generation_trainer": float(kl_generation_trainer(*logprobs)),
        "truncated_fraction": batch["truncated"].float().mean().item(),
        "completion_length": lengths.mean().item(),
        "completion_length_max": lengths.max().item(),
    }
