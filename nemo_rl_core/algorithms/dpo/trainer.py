"""Direct preference optimization (DPO, arXiv:2305.18290): pairs, reference, train, save."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import cast

from torch import Tensor

from nemo_rl_core.algorithms.dpo.config import BuiltinPreferenceLoss, DPOConfig, DPOSettings
from nemo_rl_core.algorithms.dpo.data import mismatched
from nemo_rl_core.algorithms.dpo.loss import DPOLossFn
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.data.loader import PromptLoader
from nemo_rl_core.data.pairs import PreferencePair, load_pairs_for, pair_batch, refuse_beyond_budget
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.functional.preference import kto_baseline
from nemo_rl_core.functional.protocols import LossFunction
from nemo_rl_core.trainers.base import BaseTrainer
from nemo_rl_core.trainers.loop import RunSpec
from nemo_rl_core.trainers.validation import loss_metrics


class DPOTrainer(BaseTrainer[DPOSettings, DPOConfig]):
    """Trains on preference pairs; validation is loss and accuracy on held-out pairs.

    The reference's logprobs are read from the spec's cache, or computed in each step without one.
    """

    algorithm = "dpo"
    settings_class = DPOSettings

    def _policy_methods(self) -> dict[str, str]:
        methods = {}
        if self.config.validate_every_num_steps is not None or not self.config.loss.needs_pairs:
            methods["get_logprobs"] = "logprobs of pairs"
        if self.config.needs_reference:
            methods["get_reference_logprobs"] = "logprobs of the reference, for this loss"
        return methods

    def _stage(self, spec: RunSpec) -> str:
        return f"dpo_iteration {spec.iteration}"

    def _set_up(self, spec: RunSpec, resources: ExitStack) -> None:
        super()._set_up(spec, resources)
        builtin = cast("BuiltinPreferenceLoss", self.config.loss)
        self._loss: LossFunction = self.custom_functions.loss or DPOLossFn(builtin)
        self._held_out = (
            load_pairs_for(spec.start, spec.validation, name="validation")
            if spec.validation
            else []
        )

    def _load(self, spec: RunSpec) -> PromptLoader[PreferencePair]:
        cached = spec.reference_logprobs if self.config.needs_reference else None
        pairs = load_pairs_for(spec.start, spec.train, name="train", reference_logprobs=cached)
        refuse_beyond_budget(pairs, max_tokens=self.config.max_tokens_per_microbatch)
        size, seed = self.config.num_pairs_per_step, self.settings.seed
        return PromptLoader(pairs, batch_size=size, seed=seed)

    def _training_setup(self, spec: RunSpec) -> TrainingSetup:
        reference = spec.reference if self.config.needs_reference else None
        return replace(super()._training_setup(spec), reference_folder=reference)

    def _train_step(self, batch: list[PreferencePair]) -> dict[str, float]:
        with self.timer.phase("logprobs"):
            data = self._batch(batch)
        with self.timer.phase("train"):
            return self.policy.train(data, self._loss)

    def _validate(self) -> dict[str, float]:
        if not self._held_out:
            return {}
        batch = self._batch(self._held_out)
        return loss_metrics(self._loss, self.policy.get_logprobs(batch)["logprobs"], batch)

    def _batch(self, pairs: Sequence[PreferencePair]) -> BatchedDataDict:
        batch = pair_batch(pairs)
        if self.config.needs_reference and "reference_logprobs" not in batch:
            batch["reference_logprobs"] = self.policy.get_reference_logprobs(batch)["logprobs"]
        if not self.config.loss.needs_pairs:
            batch["kl_baseline"] = self._kl_baseline(pairs)
            del batch["pair_ids"]
        return batch

    def _kl_baseline(self, pairs: Sequence[PreferencePair]) -> Tensor:
        """Estimates KTO's `KL(policy || reference)` from completions of other prompts."""
        batch = mismatched(pairs)
        current = self.policy.get_logprobs(batch)["logprobs"]
        reference = self.policy.get_reference_logprobs(batch)["logprobs"]
        log_ratios = ((current - reference) * batch["token_mask"]).sum(dim=1)
        return kto_baseline(log_ratios, batch["sample_mask"])
