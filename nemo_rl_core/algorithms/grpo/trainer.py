"""Group-relative policy optimization (GRPO, arXiv:2402.03300): the loop, as the paper has it."""

from pathlib import Path

import torch

from nemo_rl_core.algorithms.grpo.config import GRPOConfig
from nemo_rl_core.algorithms.grpo.data import grpo_batch, rollout_rows, save_rollouts
from nemo_rl_core.algorithms.grpo.loss import GRPOLossFn
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.config.training import TrainingConfig
from nemo_rl_core.data.loader import PromptLoader, load_prompts
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.functional.advantages import zero_variance_fraction
from nemo_rl_core.functional.importance import kl_generation_trainer
from nemo_rl_core.infra.timer import Timer
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.models.validation import check_consistency
from nemo_rl_core.rollouts.sampler import RolloutSetup, Sampler
from nemo_rl_core.trainers.base import FitResult, StepLoop, StepRange
from nemo_rl_core.types import Rollout


class GRPOTrainer:
    """Rolls out, scores, and trains on one cluster, trainer and engine taking turns.

    Args:
        config: Batch sizes, loss, advantage and optimizer.
        session: Where the workers run.
        training: Which training backend.
        setup: Engine, environment and seed.
    """

    def __init__(
        self,
        config: GRPOConfig,
        session: ClusterSession,
        *,
        training: TrainingConfig,
        setup: RolloutSetup,
    ) -> None:
        self._config = config
        self._session = session
        self._training = training
        self._setup = setup
        self._loss = GRPOLossFn(config.loss)

    def fit(
        self, data: Path, *, start: Path, reference: Path, iteration: int, work: Path
    ) -> FitResult:
        """Runs the steps of one iteration.

        Args:
            data: Folder of a data set of prompts.
            start: What the last iteration, or a supervised stage, handed on: `model/`, and
                `trainer/`, which is read from the second iteration on.
            reference: The transformers folder that the KL penalty holds on to.
            iteration: 1-based; says which prompts and seeds are next.
            work: Folder of this stage; an interrupted attempt in it is continued.
        """
        num_steps = self._config.num_steps_per_iteration
        loop = StepLoop(
            work,
            stage=f"grpo_iteration {iteration}",
            steps=StepRange((iteration - 1) * num_steps + 1, iteration * num_steps),
            save_every_num_steps=self._config.save_every_num_steps,
        )
        if loop.is_finished:
            return loop.finish()
        model_folder = start / "model"
        self._policy = Policy(
            self._session, self._training, self._training_setup(model_folder, reference)
        )
        if iteration > 1:
            self._policy.load_checkpoint(start)
        with Sampler(self._session, self._setup, model_folder) as sampler:
            self._sampler = sampler
            self._prompts = PromptLoader(
                load_prompts(data, sampler.tokenizer),
                batch_size=self._config.num_prompts_per_step,
                seed=self._setup.seed,
            )
            for step in loop.steps(self._policy):
                self._run_step(step, loop, work)
            return loop.finish(peak_memory_gib=self._peak_memory_gib())

    def _run_step(self, step: int, loop: StepLoop, work: Path) -> None:
        config, timer = self._config, Timer()
        with timer.phase("sync"):
            self._sampler.generation.update_weights(self._policy)
        with timer.phase("rollout"):
            rollouts = self._sampler.engine.run(
                self._prompts.batch(step - 1),
                num_generations_per_prompt=config.num_generations_per_prompt,
                step=step,
            )
        with timer.phase("reward"):
            rollouts = self._sampler.score(rollouts)
        batch = grpo_batch(
            rollouts,
            num_generations_per_prompt=config.num_generations_per_prompt,
            advantage=config.advantage,
        )
        with timer.phase("logprobs"):
            self._add_logprobs(batch)
        error = check_consistency(batch, bound=config.gate.max_token_mult_prob_error)
        with timer.phase("train"):
            trained = self._train(batch)
        rows = rollout_rows(rollouts, batch["advantages"])
        save_rollouts(rows, work / "rollouts" / f"step_{step:06d}.parquet")
        health = {"token_mult_prob_error": error, **_health(batch, rollouts)}
        loop.report(step, {**health, **trained}, timer.take())

    def _training_setup(self, model_folder: Path, reference: Path) -> TrainingSetup:
        return TrainingSetup(
            model_folder=model_folder,
            optimizer=self._config,
            max_tokens_per_microbatch=self._config.max_tokens_per_microbatch,
            # The policy is the distribution that was sampled from, so under its temperature.
            temperature=self._setup.generation.temperature,
            dtype=self._setup.dtype,
            reference_folder=reference if self._config.loss.kl else None,
            seed=self._setup.seed,
        )

    def _add_logprobs(self, batch: BatchedDataDict) -> None:
        batch["prev_logprobs"] = self._policy.get_logprobs(batch)["logprobs"]
        if self._config.loss.kl:
            reference = self._policy.get_reference_logprobs(batch)
            batch["reference_logprobs"] = reference["logprobs"]

    def _train(self, batch: BatchedDataDict) -> dict[str, float]:
        """Optimizer steps over consecutive parts of the batch; metrics are their means."""
        size = self._config.train_global_batch_size or batch.size
        parts = [
            self._policy.train(batch.slice(start, start + size), self._loss)
            for start in range(0, batch.size, size)
        ]
        means = {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
        return {**means, "num_valid_tokens": sum(part["num_valid_tokens"] for part in parts)}

    def _peak_memory_gib(self) -> float:
        return self._policy.peak_memory_gib() + self._sampler.generation.peak_memory_gib()


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
