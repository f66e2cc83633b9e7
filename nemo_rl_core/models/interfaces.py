"""What algorithms ask of a policy and of a generation engine; yours may implement these too."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.functional.protocols import LossFunction

if TYPE_CHECKING:
    import torch


class GenerationDatumSpec(TypedDict):
    """Columns of a batch that is to be completed.

    Attributes:
        input_ids: `[B, T]` prompts, padded on the right.
        input_lengths: `[B]`; or else
        attention_mask: `[B, T]`, 1 on the prompts.
        seeds: `[B]`, of each row's draws.
        stop_strings: What ends a row's completion besides what ends all: B lists, or None.
        max_new_tokens: `[B]`, where rows are to be shorter than the config lets them be.
    """

    input_ids: "torch.Tensor"
    input_lengths: NotRequired["torch.Tensor"]
    attention_mask: NotRequired["torch.Tensor"]
    seeds: NotRequired["torch.Tensor"]
    stop_strings: NotRequired[list[list[str] | None]]
    max_new_tokens: NotRequired["torch.Tensor"]


class GenerationOutputSpec(TypedDict):
    """Columns of a batch of completions.

    Attributes:
        output_ids: `[B, T']` prompts and completions, padded on the right.
        generation_lengths: `[B]` tokens of the completions.
        unpadded_sequence_lengths: `[B]` tokens of prompts and completions.
        logprobs: `[B, T']` of the completions' tokens in nats, 0 elsewhere; greedy ones those of
            temperature 1.
        truncated: `[B]`: a bound ended the completion, not a stop token or string.
    """

    output_ids: "torch.Tensor"
    generation_lengths: "torch.Tensor"
    unpadded_sequence_lengths: "torch.Tensor"
    logprobs: "torch.Tensor"
    truncated: "torch.Tensor"


class PolicyInterface(ABC):
    """A model that can be trained, and asked for logprobs or, with a scalar head, for values.

    Every algorithm trains; which of the others an algorithm asks for is its own affair: PPO asks a
    critic for values, distillation a teacher for its likeliest tokens. So only `train` must be
    there; the others are for you to add where your algorithm needs them.
    """

    @abstractmethod
    def train(self, data: BatchedDataDict, loss_fn: LossFunction) -> dict[str, Any]:
        """One optimizer step over the whole batch; returns its metrics.

        Args:
            data: `input_ids [B, T]`, `input_lengths [B]`, `token_mask [B, T-1]`, `sample_mask [B]`
                and what the loss reads. Rows of equal `pair_ids [B]`, where there are any, reach
                the loss together; `topk_ids [B, T-1, K]` reach it with `current_topk_logprobs`.
            loss_fn: A `LossFunction`: yours may be a plain function of that signature.
        """

    def generate(self, data: BatchedDataDict, greedy: bool) -> BatchedDataDict:
        """Completes `input_ids [B, T]`; engines do that faster (`GenerationInterface`)."""
        raise NotImplementedError(f"{type(self).__name__} has no generate")

    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """`logprobs [B, T-1]` of the next tokens where `token_mask` is set, else 0."""
        raise NotImplementedError(f"{type(self).__name__} has no get_logprobs")

    def get_reference_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """As `get_logprobs`, under the reference policy."""
        raise NotImplementedError(f"{type(self).__name__} has no get_reference_logprobs")

    def get_reference_topk_logprobs(self, data: BatchedDataDict, k: int) -> BatchedDataDict:
        """`topk_ids` and `topk_logprobs [B, T-1, k]`, likeliest first; 0 where masked."""
        raise NotImplementedError(f"{type(self).__name__} has no get_reference_topk_logprobs")

    def get_values(self, data: BatchedDataDict) -> BatchedDataDict:
        """`values [B, T]` of the prefixes that end with each token; 0 past a sequence's end."""
        raise NotImplementedError(f"{type(self).__name__} has no get_values")


class GenerationInterface(ABC):
    """An engine that completes prompts."""

    @abstractmethod
    def generate(self, data: BatchedDataDict, greedy: bool) -> BatchedDataDict:
        """Completes a `GenerationDatumSpec` batch; gives a `GenerationOutputSpec` one, in order."""

    @abstractmethod
    def prepare_for_generation(self) -> None:
        """Makes the engine ready; weights are those of the last update."""

    @abstractmethod
    def finish_generation(self) -> None:
        """Gives back what the engine needs only while it generates."""
