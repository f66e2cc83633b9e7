"""A policy of the user's, as trainers use one."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.functional.masked import valid_token_mask
from nemo_rl_core.functional.protocols import LossFunction
from nemo_rl_core.models.columns import training_columns
from nemo_rl_core.models.interfaces import PolicyInterface

_LOG = logging.getLogger(__name__)


def has_own(policy: PolicyInterface, method: str) -> bool:
    """Whether a policy overrides a method that `PolicyInterface` leaves out."""
    return getattr(type(policy), method) is not getattr(PolicyInterface, method)


class OwnPolicy(PolicyInterface):
    """Any `PolicyInterface` in a trainer.

    Logprobs may be `[B, T-1]` of the next tokens, under the sampling temperature, or `[B, T, V]` of
    all tokens at temperature 1. `train` may call the loss as a `LossFunction`, or with a
    transformers model and the batch: it then returns the loss alone.

    Args:
        policy: The user's.
        temperature: What logits are divided by before every log-softmax.
        reads_values: Whether losses read `[B, T]` values in place of logprobs.
    """

    def __init__(
        self, policy: PolicyInterface, *, temperature: float = 1.0, reads_values: bool = False
    ) -> None:
        self.policy, self._temperature = policy, temperature
        self._reads_values = reads_values
        self._says_that_nothing_is_saved = True

    @property
    def name(self) -> str:
        """The class of the user's policy."""
        return type(self.policy).__name__

    def train(self, data: BatchedDataDict, loss_fn: LossFunction) -> dict[str, Any]:
        """One step of the user's policy; the loss's metrics stand beside what it returns."""
        batch = training_columns(data)
        loss = _CallableLoss(
            loss_fn, batch, self._temperature, reads_values_of=self._reads_values and self.name
        )
        returned: Any = self.policy.train(batch, cast("LossFunction", loss))
        if not isinstance(returned, Mapping):
            raise TypeError(f"{self.name}.train returned {type(returned).__name__}, not a dict")
        metrics = {name: float(value) for name, value in returned.items()}
        counted = {"num_valid_tokens": float(loss.num_valid_tokens)}
        return {**counted, **loss.metrics, **metrics}

    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """`logprobs [B, T-1]` of the next tokens."""
        return self._next_token(self.policy.get_logprobs, data)

    def get_reference_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """As `get_logprobs`, under the user's reference.

        Raises:
            ConfigError: If the policy has none.
        """
        if not has_own(self.policy, "get_reference_logprobs"):
            raise ConfigError(
                f"the loss compares with a reference, which {self.name} does not have",
                expected=f"{self.name}.get_reference_logprobs(batch)",
                fix="add the method, or choose a loss without a reference, such as "
                "loss={'kl': None} of GRPO",
            )
        return self._next_token(self.policy.get_reference_logprobs, data)

    def get_reference_topk_logprobs(self, data: BatchedDataDict, k: int) -> BatchedDataDict:
        """`topk_ids` and `topk_logprobs [B, T-1, k]` under the user's reference."""
        return self.policy.get_reference_topk_logprobs(training_columns(data), k)

    def get_values(self, data: BatchedDataDict) -> BatchedDataDict:
        """`values [B, T]`."""
        return self.policy.get_values(training_columns(data))

    def save_checkpoint(self, path: Path) -> None:
        """Has the user's policy write its weights; one that cannot keeps them to itself."""
        if has_own(self.policy, "save_checkpoint"):
            self.policy.save_checkpoint(path)
        elif self._says_that_nothing_is_saved:
            self._says_that_nothing_is_saved = False
            _LOG.warning(
                "%s has no save_checkpoint(path): the run keeps no weights, and cannot be resumed",
                self.name,
            )

    def load_checkpoint(self, path: Path) -> None:
        """Has the user's policy go on from what it wrote.

        Raises:
            ConfigError: If it cannot.
        """
        if not has_own(self.policy, "load_checkpoint"):
            raise ConfigError(
                f"an interrupted run cannot go on: {self.name} has no load_checkpoint(path)",
                fix="add the method, or start the run under another name",
            )
        self.policy.load_checkpoint(path)

    def peak_memory_gib(self) -> float:
        """0: the policy's memory is that of this process."""
        return 0.0

    def _next_token(self, compute: Any, data: BatchedDataDict) -> BatchedDataDict:
        batch = training_columns(data)
        found = compute(batch)["logprobs"]
        if found.dim() == 3:
            found = _of_next_tokens(found, batch["input_ids"], self._temperature)
        expected = tuple(batch["token_mask"].shape)
        if tuple(found.shape) != expected:
            raise ConfigError(
                f"the logprobs of {self.name} have another shape than the batch",
                expected=f"[B, T-1] = {list(expected)}, or [B, T, V]",
                got=str(list(found.shape)),
                fix="return one logprob for each token but the first",
            )
        mask = batch["token_mask"].bool()
        return BatchedDataDict({"logprobs": torch.where(mask, found.detach().cpu(), 0.0)})


class _CallableLoss:
    """A loss that a user's `train` calls with logprobs, or with a model and the batch.

    Attributes:
        metrics: Of the last calls, summed over micro-batches.
        num_valid_tokens: Tokens that are trained on in the whole batch.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        batch: BatchedDataDict,
        temperature: float,
        *,
        reads_values_of: str | Literal[False] = False,
    ) -> None:
        self._loss_fn, self._temperature = loss_fn, temperature
        self._reads_values_of = reads_values_of
        self.num_valid_tokens = valid_token_mask(batch["token_mask"], batch["sample_mask"]).sum()
        self._num_valid_seqs = batch["sample_mask"].sum().float()
        self.metrics: dict[str, float] = {}

    def __call__(self, first: Any, batch: Any, **counts: Tensor) -> Any:
        given = {
            "global_valid_seqs": self._num_valid_seqs,
            "global_valid_tokens": self.num_valid_tokens.float(),
            **counts,
        }
        is_model = not isinstance(first, Tensor)
        if is_model:
            first, batch = self._by_model(first, batch)
        elif "topk_ids" in batch:
            BatchedDataDict(batch).require(["current_topk_logprobs"])
        loss, metrics = self._loss_fn(first, batch, **given)
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + float(value)
        return loss if is_model else (loss, metrics)

    def _by_model(self, model: Any, batch: BatchedDataDict) -> tuple[Tensor, BatchedDataDict]:
        """`logprobs [B, T-1]`, and the batch with those of `topk_ids`, where it has such."""
        if self._reads_values_of:
            raise ConfigError(
                "the loss reads values, which it cannot ask a language model for",
                expected="loss_fn(values, batch) with values [B, T], one a token",
                got=f"loss_fn({type(model).__name__}, batch)",
                fix=f"compute the values in {self._reads_values_of}.train",
            )
        place = torch.arange(batch["input_ids"].shape[1])
        mask = (place < batch["input_lengths"][:, None]).long()
        logits = model(input_ids=batch["input_ids"], attention_mask=mask).logits
        logprobs = torch.log_softmax(logits.float() / self._temperature, dim=-1)
        if "topk_ids" in batch:
            student = logprobs[:, :-1].gather(-1, batch["topk_ids"])
            batch = BatchedDataDict({**batch, "current_topk_logprobs": student})
        return _picked(logprobs, batch["input_ids"]), batch


def _of_next_tokens(logprobs: Tensor, input_ids: Tensor, temperature: float) -> Tensor:
    """`[B, T-1]` from `[B, T, V]` at temperature 1."""
    scaled = torch.log_softmax(logprobs / temperature, dim=-1) if temperature != 1 else logprobs
    return _picked(scaled, input_ids)


def _picked(logprobs: Tensor, input_ids: Tensor) -> Tensor:
    ids = input_ids[:, 1:, None].to(logprobs.device)
    return logprobs[:, :-1].gather(-1, ids)[..., 0]
