"""On-policy distillation (GKD, arXiv:2306.13649): the student samples, the teacher scores."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import ClassVar, cast

from nemo_rl_core.algorithms.distillation.config import DistillationConfig, DistillationSettings
from nemo_rl_core.algorithms.distillation.loss import DistillationLossFn
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.models.generation.engine import Generation
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.rollouts.batch import (
    failure_metrics,
    groups_of,
    rollout_batch,
    rollout_metrics,
    valid_rollouts,
)
from nemo_rl_core.rollouts.sampler import Sampler
from nemo_rl_core.trainers.loop import RunSpec
from nemo_rl_core.trainers.rollouts import RolloutTrainer
from nemo_rl_core.types import Prompt


class DistillationTrainer(RolloutTrainer[DistillationSettings, DistillationConfig]):
    """Trains a student towards the teacher's distribution on tokens that the student sampled.

    The teacher is the spec's reference, or that of the user's own policy. Rewards are only logged,
    not trained on.
    """

    algorithm = "distillation"
    settings_class = DistillationSettings
    refuses_own: ClassVar[Mapping[str, str]] = {
        "engine": "the student's logprobs are not computed in a step, so nothing would check it",
    }

    def _policy_methods(self) -> dict[str, str]:
        teacher = {"get_reference_topk_logprobs": "the likeliest tokens of a teacher"}
        return {**super()._policy_methods(), **teacher}

    def _set_up(self, spec: RunSpec, resources: ExitStack) -> None:
        if self._own.policy is None:  # one of the user's has its own teacher
            _refuse_without_teacher(spec)
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
        # The student's logprobs are not computed in a step, so there is no gate. A policy of the
        # user's samples itself.
        if isinstance(sampler.generation, Generation):
            sampler.generation.prove(cast("Policy", self.policy))

    @property
    def _holds_rollouts(self) -> bool:
        return isinstance(self.policy, Policy)

    def _train_step(self, batch: list[Prompt]) -> dict[str, float]:
        rollouts = self._roll_out(batch)
        valid = valid_rollouts(rollouts)
        data = rollout_batch(valid)
        data["group_ids"] = groups_of(valid)  # which begin alike
        with self.timer.phase("teacher"):
            data.update(self.policy.get_reference_topk_logprobs(data, self.config.top_k))
        with self.timer.phase("train"):
            trained = self.policy.train(data, self._loss)
        environment = self._record(rollouts)
        return {**environment, **rollout_metrics(data), **failure_metrics(rollouts), **trained}


def _refuse_without_teacher(spec: RunSpec) -> None:
    if spec.reference is None or spec.reference == spec.start:
        raise ConfigError(
            "distillation needs a teacher other than the student",
            expected="another model",
            got="none" if spec.reference is None else "the model that is trained",
            fix="name the teacher: fit(dataset, reference=...), or teacher in a recipe",
        )
