"""Supervised fine-tuning: batch, train, log, save."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from nemo_rl_core.algorithms.sft.config import SFTConfig, SFTSettings
from nemo_rl_core.algorithms.sft.data import load_examples, sft_batch
from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.data.lengths import refuse_longer
from nemo_rl_core.data.loader import PromptLoader
from nemo_rl_core.data.loss_masks import SupervisedExample
from nemo_rl_core.data.pretrained import context_length, load_tokenizer
from nemo_rl_core.distributed.packing.plan import plan_microbatches
from nemo_rl_core.functional.protocols import LossFunction
from nemo_rl_core.trainers.base import BaseTrainer
from nemo_rl_core.trainers.loop import RunSpec
from nemo_rl_core.trainers.validation import loss_metrics


class SFTTrainer(BaseTrainer[SFTSettings, SFTConfig]):
    """Trains on the completions of a data set; validation is the loss on held-out ones."""

    algorithm = "sft"
    settings_class = SFTSettings

    def _policy_methods(self) -> dict[str, str]:
        validates = self.config.validate_every_num_steps is not None
        return {"get_logprobs": "logprobs of validation rows"} if validates else {}

    def _set_up(self, spec: RunSpec, resources: ExitStack) -> None:
        super()._set_up(spec, resources)
        self._loss: LossFunction = self.custom_functions.loss or NLLLoss()
        self._held_out: Sequence[SupervisedExample] = []
        if spec.validation is not None:
            self._held_out = self._examples(spec.validation, spec)
            refuse_longer(_lengths(self._held_out), context_length(spec.start), name="validation")

    def _load(self, spec: RunSpec) -> PromptLoader[SupervisedExample]:
        examples = self._examples(spec.train, spec)
        lengths = _lengths(examples)
        refuse_longer(lengths, context_length(spec.start), name="train")
        # Refuses sequences that do not fit into a micro-batch before training starts.
        plan_microbatches([max(lengths)], max_tokens=self.config.max_tokens_per_microbatch)
        size, seed = self.config.global_batch_size, self.settings.seed
        return PromptLoader(examples, batch_size=size, seed=seed)

    def _examples(self, folder: Path, spec: RunSpec) -> Sequence[SupervisedExample]:
        offered = {task: json.loads(tools) for task, tools in self.settings.tools.items()}
        return load_examples(folder, load_tokenizer(spec.start), offered)

    def _train_step(self, batch: list[SupervisedExample]) -> dict[str, float]:
        with self.timer.phase("train"):
            return self.policy.train(sft_batch(batch), self._loss)

    def _validate(self) -> dict[str, float]:
        if not self._held_out:
            return {}
        batch = sft_batch(self._held_out)
        return loss_metrics(self._loss, self.policy.get_logprobs(batch)["logprobs"], batch)


def _lengths(examples: Sequence[SupervisedExample]) -> list[int]:
    return [len(example.token_ids) for example in examples]
