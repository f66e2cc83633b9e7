"""Group-relative policy optimization (GRPO, arXiv:2402.03300): the training loop."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast

from nemo_rl_core.algorithms.grpo.advantage_config import WhitenedReturns
from nemo_rl_core.algorithms.grpo.config import (
    GRPOConfig,
    GRPOSettings,
    credits_turns,
    refuse_turn_credit,
)
from nemo_rl_core.algorithms.grpo.data import (
    StepDraws,
    add_advantages,
    figures_of_step,
    scores_of_step,
    spread_over_turns,
    whitening,
    with_outcomes,
)
from nemo_rl_core.algorithms.grpo.loss import GRPOLossFn
from nemo_rl_core.algorithms.grpo.loss_config import BuiltinLoss
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.data.loader import PromptLoader
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.models.policy.remote_compute import Columns, Computed, with_results
from nemo_rl_core.models.validation import agreement, agreement_metrics, check_consistency
from nemo_rl_core.rollouts.batch import (
    mean_advantages,
    rollout_metrics,
    turn_returns,
)
from nemo_rl_core.rollouts.engine import request_seed
from nemo_rl_core.rollouts.remote_rollouts import RemoteRollouts
from nemo_rl_core.trainers.loop import RunSpec
from nemo_rl_core.trainers.rollouts import (
    RolloutTrainer,
    num_parts,
    train_in_parts,
    with_trained,
    without_comparison,
)
from nemo_rl_core.types import Prompt

StepResult = tuple[BatchedDataDict, dict[str, float], dict[str, float]]
"""The batch with old logprobs and advantages, the metrics of the gate, and those of the loss."""


class GRPOTrainer(RolloutTrainer[GRPOSettings, GRPOConfig]):
    """Synchronous GRPO: rollouts, scoring and training alternate on one cluster."""

    algorithm = "grpo"
    settings_class = GRPOSettings
    samples_ahead: ClassVar[bool] = False

    def _policy_methods(self) -> dict[str, str]:
        methods = {**super()._policy_methods(), "get_logprobs": "logprobs of completions"}
        if self.config.reads_reference:
            setting = "loss.needs_reference" if self.config.loss.kl is None else "loss.kl"
            methods["get_reference_logprobs"] = f"logprobs of the reference, for {setting}"
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
        if spec.replay is None and spec.scorer is None:
            refuse_turn_credit(self.config, self.settings.environment)
        super()._set_up(spec, resources)
        builtin = cast("BuiltinLoss", self.config.loss)
        self._loss = self.custom_functions.loss or GRPOLossFn(builtin)
        self._may_update_once = self.policy.splits_steps and not self.config.has_kl_in_reward
        self._credits_turns = credits_turns(self.config.advantage)
        self._sampling = None if self.sampler is None else self.config.dynamic_sampling
        self._max_new_tokens = self.settings.max_rollout_tokens
        if self.config.dynamic_sampling is not None:
            # A separate order of prompts: extra samples must not shift those of later steps.
            self._more_prompts = PromptLoader(
                self._prompts(spec, spec.train),
                batch_size=self.config.num_prompts_per_step,
                seed=request_seed(self.settings.seed, 0, 0, 0),
            )

    def _train_step(self, batch: list[Prompt]) -> dict[str, float]:
        rollouts, sampling = self._sample_rollouts(batch)
        data = self._batch(rollouts)
        update = self._update_once if self._updates_once(data) else self._update_in_parts
        data, consistency, trained = update(data)
        environment = self._record(rollouts, data)
        metrics = {**environment, **consistency, **rollout_metrics(data), **sampling}
        metrics = with_trained(metrics, trained)
        return metrics if self._engine_returns_logprobs else without_comparison(metrics)

    def _updates_once(self, batch: BatchedDataDict) -> bool:
        """Whether a single optimizer step computes the old logprobs in its own forward pass."""
        size = self.config.train_global_batch_size
        return self._may_update_once and (size is None or num_parts(batch, size) == 1)

    def _update_once(self, data: BatchedDataDict) -> StepResult:
        """Runs one optimizer step, and checks the gate between gradients and update.

        If the gate masks sequences, gradients are computed again without them.
        """
        policy, derived = cast("Policy", self.policy), cast("Columns | None", None)
        scores = scores_of_step(self.config, is_current=True)
        figures: dict[str, Any] = {"agreement": partial(agreement, **self._gate)}
        if isinstance(self.config.advantage, WhitenedReturns):
            with self.timer.phase("logprobs"):
                scored = policy.compute(data, scores=scores, figures=figures_of_step(self.config))
            data.update(scored.columns)
            scores, derived = {}, whitening(scored.figures["moments"], self.config)
        else:
            data = add_advantages(data, self.config, self.custom_functions.advantage)
            derived = None if "advantages" in data else spread_over_turns
        if derived is not None:
            figures["mean_advantages"] = mean_advantages
        with self.timer.phase("train"):
            loss = replace(self._loss, prev_is_current=True)
            computed = policy.compute(
                data, scores=scores, derived=derived, loss_fn=loss, figures=figures
            )
        if scores:
            self.timer.divide("train", "logprobs", computed.seconds)
        data, consistency = self._checked_by_gate(data, computed)
        with self.timer.phase("train"):
            if consistency["num_inconsistent_sequences"]:
                return data, consistency, policy.train(data, self._loss)
            return data, consistency, computed.metrics | policy.optimizer_step()

    def _update_in_parts(self, data: BatchedDataDict) -> StepResult:
        """Scores the batch, checks the gate, and runs one or more optimizer steps."""
        figures = figures_of_step(self.config) | {"agreement": partial(agreement, **self._gate)}
        scores = scores_of_step(self.config, is_current=False)
        with self.timer.phase("logprobs"):
            computed = self.policy.compute(data, scores=scores, figures=figures)
            data, consistency = self._checked_by_gate(data, computed)
            derived: Columns = spread_over_turns
            if "advantages" not in data and isinstance(self.config.advantage, WhitenedReturns):
                derived = whitening(computed.figures["moments"], self.config)
            elif "advantages" not in data:
                data = add_advantages(data, self.config, self.custom_functions.advantage)
            if "advantages" not in data:
                figures = {"mean_advantages": mean_advantages}
                by_token = self.policy.compute(data, derived=derived, figures=figures)
                data = with_results(data, by_token)
        with self.timer.phase("train"):
            metrics = train_in_parts(
                self.policy,
                data,
                self._loss,
                size=self.config.train_global_batch_size,
                sequence_means=self._loss.sequence_means,
            )
        return data, consistency, metrics

    @property
    def _gate(self) -> dict[str, Any]:
        """Arguments of the gate: bounds, and the trainer's version if samples may be older."""
        version = self.step - 1 if self.samples_ahead else None
        return {"gate": self.config.gate, "version": version}

    def _checked_by_gate(
        self, data: BatchedDataDict, computed: Computed
    ) -> tuple[BatchedDataDict, dict[str, float]]:
        """Returns the batch with computed columns, and the metrics of the gate.

        If a bound is exceeded, the tokens are fetched, inconsistent sequences are masked, and the
        advantages are those of the others.
        """
        data = with_results(data, computed)
        compared = data.pop("compared_mask")
        metrics = agreement_metrics(computed.figures["agreement"], self.config.gate)
        if metrics is not None:
            return data, metrics
        fetched = BatchedDataDict({**data, "sample_mask": compared}).fetched()
        checked, metrics = check_consistency(fetched, **self._gate)
        # Overlong completions that the config leaves out are compared, but not trained on.
        checked["sample_mask"] = checked["sample_mask"] * data["sample_mask"]
        return add_advantages(checked, self.config, self.custom_functions.advantage), metrics

    def _batch(self, rollouts: RemoteRollouts) -> BatchedDataDict:
        batch = super()._batch(rollouts)
        advantage_fn = self.custom_functions.advantage
        if advantage_fn is not None and advantage_fn.reads_tokens:
            batch = batch.fetched()
        if self._credits_turns:
            batch["turn_returns"] = turn_returns(rollouts.valid())
        outcomes = with_outcomes(batch, self.config, max_new_tokens=self._max_new_tokens)
        return BatchedDataDict({**outcomes, "compared_mask": batch["sample_mask"]})

    def _sample_rollouts(self, prompts: list[Prompt]) -> tuple[RemoteRollouts, dict[str, float]]:
        """Samples the rollouts of the step, as recorded in a replay, and the metrics of all draws.

        Rollouts without a score stay in the records of the step.
        """
        draws = StepDraws(self._sampling, self.config.advantage, num_prompts=len(prompts))
        draws.add(self._roll_out(prompts))
        while draws.wants_more:
            further_prompts = self._further_prompts(step=self.step, num_draws=draws.num_draws)
            draws.add(self._roll_out(further_prompts, first_group=draws.num_draws * len(prompts)))
        return draws.rollouts(), draws.metrics()

    def _further_prompts(self, *, step: int, num_draws: int) -> list[Prompt]:
        assert self.config.dynamic_sampling is not None  # else there is one draw
        max_draws = self.config.dynamic_sampling.max_draws
        return self._more_prompts.batch((step - 1) * (max_draws - 1) + num_draws - 1)

    def _training_setup(self, spec: RunSpec) -> TrainingSetup:
        return replace(
            super()._training_setup(spec),
            # The policy is the sampling distribution, at its temperature.
            temperature=self.settings.generation.temperature,
            reference_folder=spec.reference if self.config.reads_reference else None,
        )
