"""What algorithms ask of a policy and of a generation engine; yours may implement these too."""

from abc import ABC, abstractmethod
from typing import Any

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.functional.protocols import LossFunction


class PolicyInterface(ABC):
    """A model that can be trained and asked for logprobs."""

    @abstractmethod
    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """`logprobs [B, T-1]` of the next tokens where `token_mask` is set, else 0."""

    @abstractmethod
    def get_reference_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """As `get_logprobs`, under the reference policy."""

    @abstractmethod
    def train(self, data: BatchedDataDict, loss_fn: LossFunction) -> dict[str, Any]:
        """One optimizer step over the whole batch; returns its metrics."""


class GenerationInterface(ABC):
    """An engine that completes prompts."""

    @abstractmethod
    def generate(self, data: BatchedDataDict, greedy: bool) -> BatchedDataDict:
        """Completes `input_ids [B, T]` up to `input_lengths [B]`, under `seeds [B]`."""

    @abstractmethod
    def prepare_for_generation(self) -> None:
        """Makes the engine ready; weights are those of the last update."""

    @abstractmethod
    def finish_generation(self) -> None:
        """Gives back what the engine needs only while it generates."""
