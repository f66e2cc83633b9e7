"""Group-relative policy optimization (GRPO, arXiv:2402.03300): the training loop."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import ClassVar, cast

from nemo_rl_core.algorithms.grpo.config import GRPOConfig, GRPOSettings
from nemo_rl_core.algorithms.grpo.data import add_advantages, grpo_batch, reads_tokens
from nemo_rl_core.algorithms.grpo.dynamic_sampling import StepDraws
from nemo_rl_core.algorithms.grpo.loss import GRPOLossFn
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.data.loader import PromptLoader, load_prompts
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.models.validation import agreement, agreement_metrics, check_consistency
from nemo_rl_core.rollouts.batch import mean_advantages, rollout_metrics, valid_rollouts
from nemo_rl_core.rollouts.engine import request_seed
from nemo_rl_core.trainers.loop import RunSpec
from nemo_rl_core.trainers.rollouts import RolloutTrainer, num_parts, train_in_parts
from nemo_rl_core.types import Prompt, Rollout


class GRPOTrainer(RolloutTrainer[GRPOSettings, GRPOConfig]):
    """Synchronous GRPO: rollouts, scoring and training alternate on one cluster."""

    algorithm = "grpo"
    settings_class = GRPOSettings
    samples_ahead: ClassVar[bool] = False

    def _stage(self, spec: RunSpec) -> str:
        return f"grpo_iteration {spec.iteration}"

    def _set_up(self, spec: RunSpec, resources: ExitStack) -> None:
        if (self.config.asynchronous is not None) != self.samples_ahead:
            raise ConfigError(
                f"{type(self).__name__} does not fit the section grpo",
                expected="GRPOTrainer without asynchronous, AsyncGRPOTrainer with it",
                got=f"asynchronous: {self.config.asynchronous!r}",
                fix="use the other trainer (named grpo or async_grpo), or change asynchronous",
            )
        super()._set_up(spec, resources)
        self._loss = GRPOLossFn(self.config.loss)
        if self.config.dynamic_sampling is not None:
            # A separate order of prompts, so that extra samples do not shift the prompts of later
            # steps.
            self._more_prompts = PromptLoader(
                load_prompts(spec.train, load_tokenizer(spec.start)),
                batch_size=self.config.num_prompts_per_step,
                seed=request_seed(self.settings.seed, 0, 0, 0),
            )

    def _train_step(self, batch: list[Prompt]) -> dict[str, float]:
        rollouts, sampling = self._sample_rollouts(batch)
        data = grpo_batch(valid_rollouts(rollouts))
        data, consistency, trained = (
            self._update_once(data) if self._updates_once(data) else self._update_in_parts(data)
        )
        environment = self._record(rollouts, advantages=mean_advantages(data))
        return {**environment, **consistency, **rollout_metrics(data), **sampling, **trained}

    @property
    def _holds_rollouts(self) -> bool:
        return isinstance(self.policy, Policy) and not reads_tokens(self.config)

    def _updates_once(self, batch: BatchedDataDict) -> bool:
        """Whether one optimizer step takes the whole batch, and nothing before reads its logprobs.

        The old logprobs are then those of its own forward pass.
        """
        size = self.config.train_global_batch_size
        return (
            isinstance(self.policy, Policy)
            and self.policy.splits_steps
            and num_parts(batch.size, size) == 1
            and not self.config.has_kl_in_reward
        )

    def _update_once(
        self, data: BatchedDataDict
    ) -> tuple[BatchedDataDict, dict[str, float], dict[str, float]]:
        """One optimizer step, which the gate stands in the middle of, between its two halves.

        Where the gate masks sequences, the others count for more: the gradients are then computed
        anew, of those that are left.

        Returns:
            The batch with old logprobs and advantages, the gate's metrics, and the step's.
        """
        policy = cast("Policy", self.policy)
        compute = self._compute_held if data.is_held else self._compute_here
        metrics, checked, consistency = compute(data, replace(self._loss, prev_is_current=True))
        with self.timer.phase("train"):
            final = self._with_advantages(checked)
            if consistency["num_inconsistent_sequences"]:
                metrics = policy.train(final, self._loss)
            else:
                metrics |= policy.optimizer_step()
        return final, consistency, metrics

    def _compute_here(
        self, data: BatchedDataDict, loss: GRPOLossFn
    ) -> tuple[dict[str, float], BatchedDataDict, dict[str, float]]:
        """Gradients, with the logprobs that they need, which the batch gets.

        Returns:
            The loss's metrics, the batch with what the gate has masked, and the gate's metrics.
        """
        policy = cast("Policy", self.policy)
        if self.config.loss.kl:
            with self.timer.phase("logprobs"):
                data["reference_logprobs"] = policy.get_reference_logprobs(data)["logprobs"]
        with self.timer.phase("train"):
            metrics, computed = policy.forward_backward(self._with_advantages(data), loss)
        data["prev_logprobs"] = computed["logprobs"]
        return metrics, *self._check_consistency(data)

    def _compute_held(
        self, data: BatchedDataDict, loss: GRPOLossFn | None
    ) -> tuple[dict[str, float], BatchedDataDict, dict[str, float]]:
        """As `_compute_here`, in one call of the ranks, of tokens that lie elsewhere.

        The ranks say how far they are off; only where a bound is passed are the tokens fetched.

        Args:
            data: The batch.
            loss: None for logprobs alone, those of the policy too.
        """
        scores = {} if loss else {"prev_logprobs": "get_logprobs"}
        if self.config.loss.kl:
            scores["reference_logprobs"] = "get_reference_logprobs"
        given = self._with_advantages(data)
        given["compared_mask"] = data["sample_mask"]
        phase = "train" if loss else "logprobs"
        with self.timer.phase(phase):
            found = cast("Policy", self.policy).compute_held(
                given, scores=scores, loss_fn=loss, figures=self._agreement()
            )
        if loss and scores:
            self.timer.divide(phase, "logprobs", found.seconds)
        data.update(found.columns)
        if (consistency := self._agreement_metrics(found.figures)) is not None:
            return found.metrics, data, consistency
        return found.metrics, *self._check_consistency(data.fetched())

    def _agreement(self) -> Callable[[BatchedDataDict], dict[str, float]]:
        """What a rank says of its rows, in place of `_check_consistency` on them."""
        return partial(agreement, gate=self.config.gate)

    def _agreement_metrics(self, parts: Sequence[dict[str, float]]) -> dict[str, float] | None:
        """The metrics of `_check_consistency`; None where it must look at the tokens."""
        return agreement_metrics(parts, self.config.gate)

    def _update_in_parts(
        self, data: BatchedDataDict
    ) -> tuple[BatchedDataDict, dict[str, float], dict[str, float]]:
        """As `_update_once`, of any number of optimizer steps on the same samples."""
        if data.is_held:
            _, data, consistency = self._compute_held(data, None)
        else:
            with self.timer.phase("logprobs"):
                self._add_logprobs(data)
            data, consistency = self._check_consistency(data)
        data = self._with_advantages(data)
        with self.timer.phase("train"):
            metrics = train_in_parts(
                self.policy,
                data,
                self._loss,
                size=self.config.train_global_batch_size,
                sequence_means=self._loss.sequence_means,
            )
        return data, consistency, metrics

    def _with_advantages(self, batch: BatchedDataDict) -> BatchedDataDict:
        limit = self.settings.max_rollout_tokens
        return add_advantages(batch, self.config, max_new_tokens=limit)

    def _check_consistency(
        self, batch: BatchedDataDict
    ) -> tuple[BatchedDataDict, dict[str, float]]:
        """Masks sequences on which engine and trainer disagree, and returns the differences."""
        return check_consistency(batch, self.config.gate)

    def _sample_rollouts(self, prompts: list[Prompt]) -> tuple[Sequence[Rollout], dict[str, float]]:
        """Samples the step's rollouts; the metrics cover all samples, as `StepDraws` has it.

        Rollouts that could not be scored stay in the records of the step. A replayed step is used
        as recorded.
        """
        draws = self._new_draws(len(prompts))
        draws.add(self._roll_out(prompts))
        while draws.wants_more:
            more = self._further_prompts(step=self.step, num_draws=draws.num_draws)
            draws.add(self._roll_out(more, first_place=draws.num_draws * len(prompts)))
        return draws.rollouts(), draws.metrics()

    def _new_draws(self, num_prompts: int) -> StepDraws:
        """Of a step that has made none."""
        sampling = None if self.sampler is None else self.config.dynamic_sampling
        return StepDraws(sampling, self.config.advantage, num_prompts=num_prompts)

    def _further_prompts(self, *, step: int, num_draws: int) -> list[Prompt]:
        """The prompts of a step's next draw, where it has made so many."""
        assert self.config.dynamic_sampling is not None  # else there is one draw
        most = self.config.dynamic_sampling.max_draws
        return self._more_prompts.batch((step - 1) * (most - 1) + num_draws - 1)

    def _training_setup(self, spec: RunSpec) -> TrainingSetup:
        return replace(
            super()._training_setup(spec),
            # The policy is the sampling distribution, at its temperature.
            temperature=self.settings.generation.temperature,
            reference_folder=spec.reference if self.config.loss.kl else None,
        )

    def _add_logprobs(self, batch: BatchedDataDict) -> None:
        batch["prev_logprobs"] = self.policy.get_logprobs(batch)["logprobs"]
        if self.config.loss.kl:
            reference = self.policy.get_reference_logprobs(batch)
            batch["reference_logprobs"] = reference["logprobs"]
