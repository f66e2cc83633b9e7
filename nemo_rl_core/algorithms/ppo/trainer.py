"""Proximal policy optimization (PPO, arXiv:1707.06347) with a critic."""

import math
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, cast

from nemo_rl_core.algorithms.ppo.config import ClippedSurrogate, PPOConfig, PPOSettings
from nemo_rl_core.algorithms.ppo.data import (
    advantage_moments,
    critic_columns,
    whitened_advantages,
)
from nemo_rl_core.algorithms.ppo.loss import PPOLossFn, ValueLossFn
from nemo_rl_core.algorithms.ppo.policy_and_critic import (
    CRITIC,
    CustomPolicyAndCritic,
    PolicyAndCritic,
)
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.functional.advantages import Moments
from nemo_rl_core.functional.protocols import LossFunction
from nemo_rl_core.functional.value import explained_variance
from nemo_rl_core.models.interfaces import PolicyInterface
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.models.policy.custom import CustomPolicyAdapter, overrides
from nemo_rl_core.models.policy.remote_compute import with_results
from nemo_rl_core.models.validation import agreement, agreement_metrics, check_consistency
from nemo_rl_core.rollouts.batch import failure_metrics, mean_advantages, rollout_metrics
from nemo_rl_core.rollouts.sampler import Sampler
from nemo_rl_core.trainers.loop import RunSpec
from nemo_rl_core.trainers.rollouts import (
    RolloutTrainer,
    combined,
    train_in_parts,
    with_trained,
    without_comparison,
)
from nemo_rl_core.types import Prompt


class PPOTrainer(RolloutTrainer[PPOSettings, PPOConfig]):
    """Trains policy and critic on the same rollouts, for several epochs.

    The critic starts from the policy's initial weights with a zero head, so that the first
    advantages depend on rewards only. Other arguments are those of `BaseTrainer`.

    Args:
        critic: A custom critic, for a custom policy: a `PolicyInterface` with `get_values`, whose
            `train` calls the loss with values `[B, T]`. Any other value overrides the section
            `critic` of the settings, with which a training backend trains the critic.

    Attributes:
        critic: The value model in training.
    """

    algorithm = "ppo"
    settings_class = PPOSettings

    critic: Policy | CustomPolicyAdapter

    def __init__(
        self, settings: Any = None, session: Any = None, *, critic: Any = None, **overrides: Any
    ) -> None:
        self._custom_critic = critic if isinstance(critic, PolicyInterface) else None
        if critic is not None and self._custom_critic is None:
            overrides["critic"] = critic
        super().__init__(settings, session, **overrides)
        _refuse_unfit_critic(self._custom.policy, self._custom_critic)
        self._custom.critic = self._custom_critic

    def _policy_methods(self) -> dict[str, str]:
        methods = {**super()._policy_methods(), "get_logprobs": "logprobs of completions"}
        if self.config.kl is not None:
            methods["get_reference_logprobs"] = "logprobs of the reference, for kl"
        return methods

    def _stage(self, spec: RunSpec) -> str:
        return f"ppo_iteration {spec.iteration}"

    def _set_up(self, spec: RunSpec, resources: ExitStack) -> None:
        super()._set_up(spec, resources)
        builtin = cast("ClippedSurrogate", self.config.loss)
        self._policy_loss: LossFunction = self.custom_functions.loss or PPOLossFn(builtin)
        self._value_loss = ValueLossFn(self.config.critic.value_clip)
        self.critic = (
            Policy(self.session, self._critic_setup(spec), name=CRITIC)
            if self._custom_critic is None
            else CustomPolicyAdapter(self._custom_critic, reads_values=True)
        )
        if spec.resume is not None:
            self.critic.load_checkpoint(spec.resume / CRITIC)

    def _update_weights(self, sampler: Sampler, *, last_step: int) -> None:
        if isinstance(self.critic, Policy):
            self.critic.release_memory()
        super()._update_weights(sampler, last_step=last_step)

    def _train_step(self, batch: list[Prompt]) -> dict[str, float]:
        rollouts = self._roll_out(batch)
        data, consistency = self._with_logprobs(self._batch(rollouts))
        data = self._with_advantages(data)
        trained = self._train(data)
        environment = self._record(rollouts, data)
        metrics = {
            **environment,
            **consistency,
            **rollout_metrics(data),
            **failure_metrics(rollouts),
        }
        metrics = with_trained(metrics, trained)
        return metrics if self._engine_returns_logprobs else without_comparison(metrics)

    def _with_logprobs(self, data: BatchedDataDict) -> tuple[BatchedDataDict, dict[str, float]]:
        """Adds the old logprobs, masks inconsistent sequences, and returns the gate's metrics.

        The ranks compare logprobs. Tokens are fetched only if a bound of the gate is exceeded.
        """
        scores, gate = {"prev_logprobs": "get_logprobs"}, self.config.gate
        if self.config.kl is not None:
            scores["reference_logprobs"] = "get_reference_logprobs"
        with self.timer.phase("logprobs"):
            computed = self.policy.compute(
                BatchedDataDict({**data, "compared_mask": data["sample_mask"]}),
                scores=scores,
                figures={"agreement": partial(agreement, gate=gate)},
            )
        data.update(computed.columns)
        metrics = agreement_metrics(computed.figures["agreement"], gate)
        return check_consistency(data.fetched(), gate) if metrics is None else (data, metrics)

    def _with_advantages(self, data: BatchedDataDict) -> BatchedDataDict:
        with self.timer.phase("values"):
            computed = self.critic.compute(
                data,
                scores={"values": "get_values"},
                derived=partial(
                    critic_columns, config=self.config, advantage_fn=self.custom_functions.advantage
                ),
                figures={"moments": advantage_moments},
            )
            names = ("old_values", "advantages", "returns")
            data = BatchedDataDict({**data, **{name: computed.columns[name] for name in names}})
            moments = Moments.joined(computed.figures["moments"])
            whitened = self.critic.compute(
                data,
                derived=partial(whitened_advantages, moments=moments),
                figures={"mean_advantages": mean_advantages},
            )
        return with_results(data, whitened)

    def _train(self, batch: BatchedDataDict) -> dict[str, float]:
        config, parts = self.config, []
        for _ in range(config.num_epochs_per_rollout):
            with self.timer.phase("train_critic"):
                value = train_in_parts(
                    self.critic, batch, self._value_loss, size=config.train_global_batch_size
                )
            metrics = _critic_metrics(value)
            if self.step > config.num_critic_warmup_steps:
                with self.timer.phase("train"):
                    trained = train_in_parts(
                        self.policy, batch, self._policy_loss, size=config.train_global_batch_size
                    )
                metrics = with_trained(metrics, trained)
            parts.append(metrics)
        return combined(parts)

    def _training_setup(self, spec: RunSpec) -> TrainingSetup:
        return replace(
            super()._training_setup(spec),
            # The policy is the sampling distribution, at its temperature.
            temperature=self.settings.generation.temperature,
            reference_folder=spec.reference if self.config.kl else None,
        )

    def _critic_setup(self, spec: RunSpec) -> TrainingSetup:
        resumed = spec.resume / CRITIC / "model" if spec.resume is not None else None
        is_custom = self._custom.policy is not None  # `training` names the policy's class
        return replace(
            super()._training_setup(spec),
            training=DTensorTraining() if is_custom else self.settings.training,
            model_folder=resumed or spec.start,
            optimizer=self.config.critic,
            head="scalar",
        )

    def _trained(self) -> "PolicyAndCritic | CustomPolicyAndCritic":
        if isinstance(self.policy, CustomPolicyAdapter):
            return CustomPolicyAndCritic(self.policy, self.critic)
        return PolicyAndCritic(self.policy, cast("Policy", self.critic))

    def _peak_memory_gib(self) -> float:
        return super()._peak_memory_gib() + self.critic.peak_memory_gib()


def _refuse_unfit_critic(policy: PolicyInterface | None, critic: PolicyInterface | None) -> None:
    if policy is None and critic is not None:
        raise ConfigError(
            "ppo takes a custom critic only with a custom policy",
            expected="PPOTrainer(policy, critic=critic)",
            got=f"critic={type(critic).__name__}",
            fix="leave the critic out, or give a policy, too",
        )
    if critic is not None and not overrides(critic, "get_values"):
        raise ConfigError(
            f"the critic {type(critic).__name__} has no get_values",
            expected="get_values(batch), which returns values [B, T]",
            fix="add the method",
        )


def _critic_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """The critic's metrics under names that do not clash with the policy's."""
    explained = explained_variance(metrics)
    return {
        # Undefined if all returns are equal, which JSON cannot represent.
        "explained_variance": 0.0 if math.isnan(explained) else explained,
        **{name: metrics[name] for name in ("value_loss", "value_mean", "value_clip_fraction")},
        **({"critic_grad_norm": metrics["grad_norm"]} if "grad_norm" in metrics else {}),
        "num_valid_tokens": metrics["num_valid_tokens"],
    }
