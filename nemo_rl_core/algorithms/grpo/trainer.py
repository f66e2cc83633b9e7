"""Group-relative policy optimization (GRPO, arXiv:2402.03300): the training loop."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import ClassVar, cast

from torch import Tensor

from nemo_rl_core.algorithms.grpo.config import GRPOConfig, GRPOSettings
from nemo_rl_core.algorithms.grpo.data import (
    add_advantages,
    differs_by_token,
    grpo_batch,
    kl_penalties,
    returns_moments,
    token_advantages,
    with_outcomes,
)
from nemo_rl_core.algorithms.grpo.dynamic_sampling import StepDraws
from nemo_rl_core.algorithms.grpo.loss import GRPOLossFn
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.data.loader import PromptLoader, load_prompts
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.functional.advantages import Moments
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.models.policy.lm_policy import HeldResults
from nemo_rl_core.models.policy.where_held import Figures
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

    def _policy_methods(self) -> dict[str, str]:
        methods = {**super()._policy_methods(), "get_logprobs": "logprobs of completions"}
        if self.config.loss.kl is not None:
            methods["get_reference_logprobs"] = "logprobs of the reference, for loss.kl"
        return methods

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
        return isinstance(self.policy, Policy)

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
        loss = replace(self._loss, prev_is_current=True)
        metrics, final, consistency = compute(data, loss)
        with self.timer.phase("train"):
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
            The loss's metrics, the batch with advantages of what the gate has left, and the gate's
            metrics.
        """
        policy = cast("Policy", self.policy)
        if self.config.loss.kl:
            with self.timer.phase("logprobs"):
                data["reference_logprobs"] = policy.get_reference_logprobs(data)["logprobs"]
        with self.timer.phase("train"):
            metrics, computed = policy.forward_backward(self._with_advantages(data), loss)
        data["prev_logprobs"] = computed["logprobs"]
        checked, consistency = self._check_consistency(data)
        with self.timer.phase("train"):
            final = self._with_advantages(checked)
        return metrics, final, consistency

    def _compute_held(
        self, data: BatchedDataDict, loss: GRPOLossFn
    ) -> tuple[dict[str, float], BatchedDataDict, dict[str, float]]:
        """As `_compute_here`, in one call of the ranks, of tokens that lie elsewhere.

        Another call comes before it where advantages differ by token: they are whitened by the
        moments of all ranks. Only where a bound of the gate is passed are the tokens fetched.
        """
        policy, given = cast("Policy", self.policy), self._for_ranks(data)
        scores, whitening = self._reference_scores, None
        figures: Figures = {"agreement": self._agreement()}
        if differs_by_token(self.config):
            with self.timer.phase("logprobs"):
                first = policy.compute_held(given, scores=scores, figures=self._sums())
            given.update(first.columns)
            scores, whitening = {}, self._whitening(first)
            figures = {**figures, "mean_advantages": mean_advantages}
        else:
            given = self._with_advantages(given)
        with self.timer.phase("train"):
            found = policy.compute_held(
                given, scores=scores, derived=whitening, loss_fn=loss, figures=figures
            )
        if scores:
            self.timer.divide("train", "logprobs", found.seconds)
        given.update(found.columns)
        checked, consistency = self._gated(given, found)
        with self.timer.phase("train"):
            if whitening is not None and checked.is_held:
                final = self._with_whitened(checked, found)
            else:
                final = self._with_advantages(checked)
        return found.metrics, final, consistency

    def _score_held(self, data: BatchedDataDict) -> tuple[BatchedDataDict, dict[str, float]]:
        """Logprobs, the gate and advantages of tokens that lie elsewhere.

        One call of the ranks, and another where advantages differ by token.

        Returns:
            The batch with old logprobs and advantages, and the gate's metrics.
        """
        policy, given = cast("Policy", self.policy), self._for_ranks(data)
        scores = {"prev_logprobs": "get_logprobs", **self._reference_scores}
        figures = {"agreement": self._agreement(), **self._sums()}
        with self.timer.phase("logprobs"):
            found = policy.compute_held(given, scores=scores, figures=figures)
            given.update(found.columns)
            checked, consistency = self._gated(given, found)
            if not checked.is_held:
                return self._with_advantages(checked), consistency
            if "kl_penalties" in figures:
                checked["kl_penalties"] = found.of_rows("kl_penalties")
            if not differs_by_token(self.config):
                return self._with_advantages(checked), consistency
            whitened = policy.compute_held(
                self._with_outcomes(checked),
                derived=self._whitening(found),
                figures={"mean_advantages": mean_advantages},
            )
        return self._with_whitened(checked, whitened), consistency

    def _for_ranks(self, data: BatchedDataDict) -> BatchedDataDict:
        """The step's rows with what ranks read of each, and those that the gate compares."""
        return BatchedDataDict({**self._with_outcomes(data), "compared_mask": data["sample_mask"]})

    @property
    def _reference_scores(self) -> dict[str, str]:
        return {"reference_logprobs": "get_reference_logprobs"} if self.config.loss.kl else {}

    def _sums(self) -> Figures:
        """What a rank returns of its rows for advantages that read values of tokens."""
        if differs_by_token(self.config):
            return {"moments": partial(returns_moments, config=self.config)}
        if self.config.has_kl_in_reward:
            return {"kl_penalties": partial(kl_penalties, config=self.config)}
        return {}

    def _whitening(self, found: HeldResults) -> Callable[[BatchedDataDict], dict[str, Tensor]]:
        """What a rank computes its rows' advantages with, from the moments of all ranks."""
        moments = Moments.joined(found.figures["moments"])
        return partial(token_advantages, config=self.config, moments=moments)

    def _with_whitened(self, checked: BatchedDataDict, found: HeldResults) -> BatchedDataDict:
        """With the advantages that ranks have computed, which stay there, and their means."""
        columns = {
            "advantages": found.columns["advantages"],
            "mean_advantages": found.of_rows("mean_advantages"),
        }
        return BatchedDataDict({**self._with_outcomes(checked), **columns})

    def _gated(
        self, given: BatchedDataDict, found: HeldResults
    ) -> tuple[BatchedDataDict, dict[str, float]]:
        """As `_check_consistency`, from what ranks say; fetches tokens where a bound is passed."""
        compared = given.pop("compared_mask")
        batch = BatchedDataDict({**given, "sample_mask": compared})
        metrics = self._agreement_metrics(found.figures["agreement"])
        if metrics is not None:
            return batch, metrics
        return self._check_consistency(batch.fetched())

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
            data, consistency = self._score_held(data)
        else:
            with self.timer.phase("logprobs"):
                self._add_logprobs(data)
            checked, consistency = self._check_consistency(data)
            data = self._with_advantages(checked)
        with self.timer.phase("train"):
            metrics = train_in_parts(
                self.policy,
                data,
                self._loss,
                size=self.config.train_global_batch_size,
                sequence_means=self._loss.sequence_means,
            )
        return data, consistency, metrics

    def _with_outcomes(self, batch: BatchedDataDict) -> BatchedDataDict:
        limit = self.settings.max_rollout_tokens
        return with_outcomes(batch, self.config, max_new_tokens=limit)

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
