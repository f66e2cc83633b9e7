"""Training of reward models on preference pairs."""

from contextlib import ExitStack
from dataclasses import replace

from nemo_rl_core.algorithms.reward_model.config import RewardModelConfig, RewardModelSettings
from nemo_rl_core.algorithms.reward_model.loss import PreferenceLossFn
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.data.loader import PromptLoader
from nemo_rl_core.data.pairs import PreferencePair, load_pairs_for, pair_batch, refuse_beyond_budget
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.models.policy.custom import CustomPolicyAdapter
from nemo_rl_core.trainers.base import BaseTrainer
from nemo_rl_core.trainers.loop import RunSpec
from nemo_rl_core.trainers.validation import loss_metrics


class RewardModelTrainer(BaseTrainer[RewardModelSettings, RewardModelConfig]):
    """Trains a scalar head and the model under it; validation is accuracy on held-out pairs.

    The checkpoint is a sequence classifier with one label, which the environment `reward_model` and
    transformers load.
    """

    algorithm = "reward_model"
    settings_class = RewardModelSettings

    def _policy_methods(self) -> dict[str, str]:
        return {"get_values": "values of sequences"}

    def _set_up(self, spec: RunSpec, resources: ExitStack) -> None:
        super()._set_up(spec, resources)
        self._loss = PreferenceLossFn(self.config.loss)
        self._held_out = (
            load_pairs_for(spec.start, spec.validation, name="validation")
            if spec.validation
            else []
        )

    def _load(self, spec: RunSpec) -> PromptLoader[PreferencePair]:
        pairs = load_pairs_for(spec.start, spec.train, name="train")
        refuse_beyond_budget(pairs, max_tokens=self.config.max_tokens_per_microbatch)
        size, seed = self.config.num_pairs_per_step, self.settings.seed
        return PromptLoader(pairs, batch_size=size, seed=seed)

    def _make_policy(self, spec: RunSpec) -> Policy | CustomPolicyAdapter:
        policy = super()._make_policy(spec)
        if isinstance(policy, CustomPolicyAdapter):
            return CustomPolicyAdapter(policy.policy, reads_values=True)
        return policy

    def _training_setup(self, spec: RunSpec) -> TrainingSetup:
        return replace(super()._training_setup(spec), head="scalar")

    def _train_step(self, batch: list[PreferencePair]) -> dict[str, float]:
        with self.timer.phase("train"):
            return self.policy.train(pair_batch(batch), self._loss)

    def _validate(self) -> dict[str, float]:
        if not self._held_out:
            return {}
        batch = pair_batch(self._held_out)
        return loss_metrics(self._loss, self.policy.get_values(batch)["values"], batch)
