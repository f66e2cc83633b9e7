"""Adapter of a custom policy to the policy of a trainer."""

import logging
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from nemo_rl_core.backends.training.base import refuse_k
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.functional.masked import num_trained_sequences, valid_token_mask
from nemo_rl_core.functional.protocols import LossFunction
from nemo_rl_core.models.columns import training_columns, with_documented_columns
from nemo_rl_core.models.interfaces import GenerationInterface, PolicyInterface
from nemo_rl_core.models.policy.remote_compute import Columns, Computed, Figures

_LOG = logging.getLogger(__name__)


def overrides(policy: PolicyInterface, method: str) -> bool:
    """Whether a policy overrides a method that `PolicyInterface` does not implement."""
    return getattr(type(policy), method) is not getattr(PolicyInterface, method)


def takes_state_dict(engine: GenerationInterface) -> bool:
    """Whether an engine has `update_weights(state_dict)`, by the name of the parameter."""
    update = getattr(engine, "update_weights", None)
    return callable(update) and next(iter(signature(update).parameters), "") == "state_dict"


class CustomPolicyAdapter(PolicyInterface):
    """Any `PolicyInterface` in a trainer.

    Logprobs may be `[B, T-1]` of the next tokens, under the sampling temperature, or `[B, T, V]` of
    all tokens at temperature 1. `train` may call the loss as a `LossFunction`, or with a
    transformers model and the batch; the loss then returns no metrics.

    Args:
        temperature: Divisor of the logits before every log-softmax.
        reads_values: Whether losses read `[B, T]` values instead of logprobs.
    """

    splits_steps = False

    def __init__(
        self, policy: PolicyInterface, *, temperature: float = 1.0, reads_values: bool = False
    ) -> None:
        self.policy, self._temperature = policy, temperature
        self._reads_values = reads_values
        self._warns_about_missing_save = True

    @property
    def name(self) -> str:
        """Name of the class of the custom policy."""
        return type(self.policy).__name__

    def train(self, data: BatchedDataDict, loss_fn: LossFunction) -> dict[str, Any]:
        """Makes one step of the custom policy; adds the loss's metrics to those that it returns."""
        batch = _as_read(data)
        loss = _CallableLoss(
            loss_fn,
            batch,
            self._temperature,
            reads_values=self._reads_values,
            policy_name=self.name,
        )
        returned: Any = self.policy.train(batch, cast("LossFunction", loss))
        if not isinstance(returned, Mapping):
            raise TypeError(f"{self.name}.train returned {type(returned).__name__}, not a dict")
        metrics = {name: float(value) for name, value in returned.items()}
        counted = {"num_valid_tokens": float(loss.num_valid_tokens)}
        return {**counted, **loss.metrics, **metrics}

    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """Returns `logprobs [B, T-1]` of the next tokens."""
        return self._next_token(self.policy.get_logprobs, data)

    def get_reference_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """Returns the logprobs of `get_logprobs` under the custom policy's reference."""
        if not overrides(self.policy, "get_reference_logprobs"):
            raise ConfigError(
                f"the loss compares with a reference, which {self.name} does not have",
                expected=f"{self.name}.get_reference_logprobs(batch)",
                fix="add the method, or choose a loss without a reference, such as "
                "loss={'kl': None} of GRPO",
            )
        return self._next_token(self.policy.get_reference_logprobs, data)

    def get_reference_topk_logprobs(self, data: BatchedDataDict, k: int) -> BatchedDataDict:
        """Returns `topk_ids` and `topk_logprobs [B, T-1, k]` under the policy's reference.

        A policy without this method may return `[B, T, V]` logprobs of its reference instead.
        """
        batch = _as_read(data)
        if overrides(self.policy, "get_reference_topk_logprobs"):
            return self.policy.get_reference_topk_logprobs(batch, k)
        logprobs = self.policy.get_reference_logprobs(batch)["logprobs"].detach().cpu()
        if logprobs.dim() != 3:
            raise ConfigError(
                f"{self.name}.get_reference_logprobs does not show the teacher's likeliest tokens",
                expected="logprobs [B, T, V] of all tokens",
                got=str(list(logprobs.shape)),
                fix="return all logprobs, or add get_reference_topk_logprobs(batch, k)",
            )
        refuse_k(k, logprobs.shape[-1])
        values, ids = torch.log_softmax(logprobs[:, :-1] / self._temperature, dim=-1).topk(k)
        mask = batch["token_mask"].bool()[..., None]
        columns = {"topk_ids": ids.where(mask, 0), "topk_logprobs": values.where(mask, 0.0)}
        return BatchedDataDict(columns)

    def get_values(self, data: BatchedDataDict) -> BatchedDataDict:
        """Returns `values [B, T]`."""
        return self.policy.get_values(_as_read(data))

    def compute(
        self,
        data: BatchedDataDict,
        *,
        figures: Figures,
        scores: Mapping[str, str] | None = None,
        derived: Columns | None = None,
    ) -> Computed:
        """Does the same as `Policy.compute`, in this process and without a loss."""
        batch, computed = training_columns(data), BatchedDataDict()
        for name, method in (scores or {}).items():
            column = "values" if method == "get_values" else "logprobs"
            computed[name] = batch[name] = getattr(self, method)(batch)[column]
        if derived is not None:
            computed.update(derived(batch))
            batch.update(computed)
        values = {name: [function(batch)] for name, function in figures.items()}
        return Computed(computed, values, {}, 0.0, np.arange(batch.size))

    def save_checkpoint(self, path: Path) -> None:
        """Lets the custom policy write its weights; warns if it cannot."""
        if overrides(self.policy, "save_checkpoint"):
            self.policy.save_checkpoint(path)
        elif self._warns_about_missing_save:
            self._warns_about_missing_save = False
            _LOG.warning(
                "%s has no save_checkpoint(path): the run keeps no weights, and cannot be resumed",
                self.name,
            )

    def load_checkpoint(self, path: Path) -> None:
        """Lets the custom policy resume from its checkpoint."""
        if not overrides(self.policy, "load_checkpoint"):
            raise ConfigError(
                f"an interrupted run cannot resume: {self.name} has no load_checkpoint(path)",
                fix="add the method, or start the run under another name",
            )
        self.policy.load_checkpoint(path)

    def peak_memory_gib(self) -> float:
        """Returns 0: the policy's memory is that of this process."""
        return 0.0

    def _next_token(self, compute: Any, data: BatchedDataDict) -> BatchedDataDict:
        batch = _as_read(data)
        logprobs = compute(batch)["logprobs"]
        if logprobs.dim() == 3:
            logprobs = _of_next_tokens(logprobs, batch["input_ids"], self._temperature)
        expected = tuple(batch["token_mask"].shape)
        if tuple(logprobs.shape) != expected:
            raise ConfigError(
                f"the logprobs of {self.name} do not have the shape of the batch",
                expected=f"[B, T-1] = {list(expected)}, or [B, T, V]",
                got=str(list(logprobs.shape)),
                fix="return one logprob for each token but the first",
            )
        mask = batch["token_mask"].bool()
        return BatchedDataDict({"logprobs": torch.where(mask, logprobs.detach().cpu(), 0.0)})


def _as_read(data: BatchedDataDict) -> BatchedDataDict:
    return with_documented_columns(training_columns(data))


class _CallableLoss:
    """A loss that a custom `train` calls with logprobs, or with a model and the batch."""

    def __init__(
        self,
        loss_fn: LossFunction,
        batch: BatchedDataDict,
        temperature: float,
        *,
        reads_values: bool,
        policy_name: str,
    ) -> None:
        self._loss_fn, self._temperature = loss_fn, temperature
        self._reads_values, self._policy_name = reads_values, policy_name
        self.num_valid_tokens = valid_token_mask(batch["token_mask"], batch["sample_mask"]).sum()
        self._num_valid_seqs = num_trained_sequences(batch).float()
        self.metrics: dict[str, float] = {}

    def __call__(self, first: Any, batch: Any, **counts: Tensor) -> Any:
        all_counts = {
            "global_valid_seqs": self._num_valid_seqs,
            "global_valid_tokens": self.num_valid_tokens.float(),
            **counts,
        }
        is_model = not isinstance(first, Tensor)
        if is_model:
            first, batch = self._by_model(first, batch)
        elif "topk_ids" in batch:
            BatchedDataDict(batch).require(["current_topk_logprobs"])
        loss, metrics = self._loss_fn(first, batch, **all_counts)
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + float(value)
        return loss if is_model else (loss, metrics)

    def _by_model(self, model: Any, batch: BatchedDataDict) -> tuple[Tensor, BatchedDataDict]:
        """Returns `logprobs [B, T-1]`, and the batch with logprobs of its `topk_ids`, if any."""
        if self._reads_values:
            raise ConfigError(
                "the loss reads values, which it cannot ask a language model for",
                expected="loss_fn(values, batch) with values [B, T], one per token",
                got=f"loss_fn({type(model).__name__}, batch)",
                fix=f"compute the values in {self._policy_name}.train",
            )
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        if mask is None or mask.shape != ids.shape:
            lengths = BatchedDataDict(batch)["input_lengths"].to(ids.device)
            mask = (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]).long()
        logits = model(input_ids=ids, attention_mask=mask).logits
        logprobs = torch.log_softmax(logits.float() / self._temperature, dim=-1)
        if "topk_ids" in batch:
            student = logprobs[:, :-1].gather(-1, batch["topk_ids"])
            batch = BatchedDataDict({**batch, "current_topk_logprobs": student})
        return _logprobs_of_ids(logprobs, ids), batch


def _of_next_tokens(logprobs: Tensor, input_ids: Tensor, temperature: float) -> Tensor:
    scaled = torch.log_softmax(logprobs / temperature, dim=-1) if temperature != 1 else logprobs
    return _logprobs_of_ids(scaled, input_ids)


def _logprobs_of_ids(logprobs: Tensor, input_ids: Tensor) -> Tensor:
    ids = input_ids[:, 1:, None].to(logprobs.device)
    return logprobs[:, :-1].gather(-1, ids)[..., 0]
