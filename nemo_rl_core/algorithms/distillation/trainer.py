"""On-policy distillation (GKD, arXiv:2306.13649): the student samples, the teacher scores."""

import math
from contextlib import ExitStack
from dataclasses import replace
from typing import cast

from nemo_rl_core.algorithms.distillation.config import DistillationConfig, DistillationSettings
from nemo_rl_core.algorithms.distillation.loss import DistillationLossFn
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.models.policy.custom import overrides
from nemo_rl_core.rollouts.batch import failure_metrics, rollout_metrics
from nemo_rl_core.rollouts.sampler import Sampler
from nemo_rl_core.trainers.loop import RunSpec
from nemo_rl_core.trainers.rollouts import RolloutTrainer
from nemo_rl_core.types import Prompt


class DistillationTrainer(RolloutTrainer[DistillationSettings, DistillationConfig]):
    """Trains a student towards the teacher's distribution on tokens that the student sampled.

    The teacher is the spec's reference, or that of a custom policy. Rewards are only logged, not
    trained on.
    """

    algorithm = "distillation"
    settings_class = DistillationSettings

    def _policy_methods(self) -> dict[str, str]:
        method = "get_reference_topk_logprobs"
        if self._custom.policy and overrides(self._custom.policy, "get_reference_logprobs"):
            method = "get_reference_logprobs"
        methods = {**super()._policy_methods(), method: "the likeliest tokens of a teacher"}
        if self._custom.engine is not None:
            methods["get_logprobs"] = "logprobs of the student, which check the engine"
        return methods

    def _set_up(self, spec: RunSpec, resources: ExitStack) -> None:
        has_teacher = spec.reference is not None and spec.reference != spec.start
        if self._custom.policy is None and not has_teacher:  # a custom policy has a teacher
            raise ConfigError(
                "distillation needs a teacher other than the student",
                expected="another model",
                got="none" if spec.reference is None else "the model that is trained",
                fix="name the teacher: fit(dataset, reference=...), or teacher in a recipe",
            )
        super()._set_up(spec, resources)
        self._loss = DistillationLossFn(self.config.divergence)

    def _training_setup(self, spec: RunSpec) -> TrainingSetup:
        return replace(
            super()._training_setup(spec),
            temperature=self.settings.generation.temperature,
            reference_folder=spec.reference,
        )

    def _update_weights(self, sampler: Sampler, *, last_step: int) -> None:
        super()._update_weights(sampler, last_step=last_step)
        # A step does not compute the student's logprobs, so it has no gate.
        if self._policy_samples:
            return
        engine = sampler.generation
        if math.isnan(engine.prove(cast("Policy", self.policy))):
            raise ConfigError(
                f"the engine {engine.config.backend} returns no logprobs, and no step computes the "
                "student's, so nothing would check the engine",
                expected="an engine that returns logprobs",
                fix="return them, or choose another engine",
            )

    def _train_step(self, batch: list[Prompt]) -> dict[str, float]:
        rollouts = self._roll_out(batch)
        data = self._batch(rollouts)
        with self.timer.phase("teacher"):
            data.update(self.policy.get_reference_topk_logprobs(data, self.config.top_k))
        with self.timer.phase("train"):
            trained = self.policy.train(data, self._loss)
        environment = self._record(rollouts)
        return {**environment, **rollout_metrics(data), **failure_metrics(rollouts), **trained}
