"""Group-relative policy optimization (GRPO, arXiv:2402.03300): the loop, as the paper has it."""

from contextlib import ExitStack
from dataclasses import replace
from typing import ClassVar

import torch

from nemo_rl_core.algorithms.grpo.advantage_config import GDPO
from nemo_rl_core.algorithms.grpo.config import GRPOConfig, GRPOSettings
from nemo_rl_core.algorithms.grpo.data import add_advantages, grpo_batch
from nemo_rl_core.algorithms.grpo.loss import GRPOLossFn
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.data.loader import PromptLoader, load_prompts
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.functional.advantages import informative_groups, zero_variance_fraction
from nemo_rl_core.models.validation import check_consistency
from nemo_rl_core.rollouts.batch import mean_advantages, rollout_metrics
from nemo_rl_core.rollouts.engine import request_seed
from nemo_rl_core.rollouts.quarantine import failure_metrics, valid_rollouts
from nemo_rl_core.trainers.base import Job
from nemo_rl_core.trainers.minibatches import train_in_parts
from nemo_rl_core.trainers.rollouts import RolloutTrainer
from nemo_rl_core.types import Prompt, Rollout


class GRPOTrainer(RolloutTrainer[GRPOSettings, GRPOConfig]):
    """Rolls out, scores, and trains on one cluster, trainer and engine taking turns."""

    algorithm = "grpo"
    settings_class = GRPOSettings
    samples_ahead: ClassVar[bool] = False

    def _stage(self, job: Job) -> str:
        return f"grpo_iteration {job.iteration}"

    def _set_up(self, job: Job, resources: ExitStack) -> None:
        if (self.config.asynchronous is not None) != self.samples_ahead:
            raise ConfigError(
                f"{type(self).__name__} does not train as the section grpo says",
                expected="GRPOTrainer without asynchronous, AsyncGRPOTrainer with it",
                got=f"asynchronous: {self.config.asynchronous!r}",
                fix="take the other trainer (named grpo or async_grpo), or change asynchronous",
            )
        super()._set_up(job, resources)
        self._loss = GRPOLossFn(self.config.loss)
        if self.config.dynamic_sampling is not None:
            # Another order than that of the steps, which extra draws must not run ahead of.
            self._more_prompts = PromptLoader(
                load_prompts(job.train, load_tokenizer(job.start)),
                batch_size=self.config.num_prompts_per_step,
                seed=request_seed(self.settings.seed, 0, 0, 0),
            )

    def _train_step(self, batch: list[Prompt]) -> dict[str, float]:
        rollouts, drawn = self._draw(batch)
        data = grpo_batch(valid_rollouts(rollouts))
        with self.timer.phase("logprobs"):
            self._add_logprobs(data)
        data, consistency = self._check_consistency(data)
        limit = self.settings.max_rollout_tokens
        data = add_advantages(data, self.config, max_new_tokens=limit)
        with self.timer.phase("train"):
            size = self.config.train_global_batch_size
            trained = train_in_parts(
                self.policy, data, self._loss, size=size, sequence_means=self._loss.sequence_means
            )
        environment = self._record(rollouts, advantages=mean_advantages(data))
        return {**environment, **consistency, **rollout_metrics(data), **drawn, **trained}

    def _check_consistency(
        self, batch: BatchedDataDict
    ) -> tuple[BatchedDataDict, dict[str, float]]:
        """The batch without what engine and trainer disagree on, and by how much they do."""
        return check_consistency(batch, self.config.gate)

    def _draw(self, prompts: list[Prompt]) -> tuple[list[Rollout], dict[str, float]]:
        """The step's rollouts, and figures on all that was drawn for them.

        With dynamic sampling, groups whose rewards are all equal are drawn anew with other prompts,
        and surplus groups are dropped, so that no completion is older than its weights. If no group
        of any draw teaches anything, the step takes the first draw. Rollouts that could not be
        scored stay in the records of the step. A replayed step is taken as it was recorded.
        """
        first = drawn = self._roll_out(prompts)
        sampling = self.config.dynamic_sampling
        if sampling is None or self.sampler is None:
            return first, _drawn_metrics(first)
        kept, draws = self._informative(first), 1
        while len(_groups(kept)) < len(prompts) and draws < sampling.max_draws:
            index = (self.step - 1) * (sampling.max_draws - 1) + draws - 1
            more = self._roll_out(self._more_prompts.batch(index), first_place=draws * len(prompts))
            drawn, draws = drawn + more, draws + 1
            kept += self._informative(more)
        wanted = set(_groups(kept)[: len(prompts)])
        metrics = {**_drawn_metrics(drawn), "num_draws": float(draws)}
        if not wanted:
            return first, metrics
        failed = [rollout for rollout in drawn if rollout.error is not None]
        return [rollout for rollout in kept if rollout.group in wanted] + failed, metrics

    def _informative(self, rollouts: list[Rollout]) -> list[Rollout]:
        rollouts = valid_rollouts(rollouts)
        data = grpo_batch(rollouts)
        rewards = data["rewards"][:, None]
        if isinstance(self.config.advantage, GDPO):
            # It normalizes each reward alone: sums may be equal where the parts are not.
            rewards = data.get("reward_components", rewards)
        masks = [informative_groups(part, data["group_ids"]) for part in rewards.unbind(dim=1)]
        informative = torch.stack(masks).any(dim=0).tolist()
        return [rollout for rollout, keep in zip(rollouts, informative, strict=True) if keep]

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


def _groups(rollouts: list[Rollout]) -> list[int]:
    """The groups that there are, in order of first appearance."""
    return list(dict.fromkeys(rollout.group for rollout in rollouts))


def _drawn_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """Of every rollout that was sampled, also those that dynamic sampling sets aside."""
    data = grpo_batch(valid_rollouts(rollouts))
    of_all = rollout_metrics(data)
    return {
        "reward": of_all["reward"],
        "reward_std": of_all["reward_std"],
        "zero_variance_fraction": float(zero_variance_fraction(data["rewards"], data["group_ids"])),
        **failure_metrics(rollouts),
    }
