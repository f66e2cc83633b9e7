"""What algorithms ask of a policy and of a generation engine; yours may implement these too."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.functional.protocols import LossFunction

if TYPE_CHECKING:
    from pathlib import Path

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


class TrainingDatumSpec(TypedDict):
    """Columns of a batch that is trained on; a loss reads others besides.

    Attributes:
        input_ids: `[B, T]`, padded on the right.
        input_lengths: `[B]`; or else
        attention_mask: `[B, T]`, 1 on the tokens of a row.
        token_mask: `[B, T-1]`, 1 where the next token is trained on; by default everywhere.
        sample_mask: `[B]`, 1 for rows that are trained on; by default all.
    """

    input_ids: "torch.Tensor"
    input_lengths: NotRequired["torch.Tensor"]
    attention_mask: NotRequired["torch.Tensor"]
    token_mask: NotRequired["torch.Tensor"]
    sample_mask: NotRequired["torch.Tensor"]


class LogprobsSpec(TypedDict):
    """What `get_logprobs` returns.

    Attributes:
        logprobs: `[B, T-1]` of the next tokens in nats, 0 where `token_mask` is not set.
    """

    logprobs: "torch.Tensor"


class PolicyInterface(ABC):
    """A model that can be trained, and asked for logprobs or, with a scalar head, for values.

    Every algorithm trains; which of the others an algorithm asks for is its own affair: PPO asks a
    critic for values, distillation a teacher for its likeliest tokens. So only `train` must be
    there; the others are for you to add where your algorithm needs them. A trainer takes such a
    policy in place of a model, `GRPOTrainer(policy, model=...)`.
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

    def generate(self, data: BatchedDataDict, greedy: bool = False) -> BatchedDataDict:
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

    def save_checkpoint(self, path: "Path") -> None:
        """Writes the weights into `path/model`, and what training goes on from beside it.

        A trainer calls it on the steps that are saved; without it a run keeps no weights.
        """
        raise NotImplementedError(f"{type(self).__name__} has no save_checkpoint")

    def load_checkpoint(self, path: "Path") -> None:
        """Goes on from what `save_checkpoint` wrote."""
        raise NotImplementedError(f"{type(self).__name__} has no load_checkpoint")


class GenerationInterface(ABC):
    """An engine that completes prompts.

    A trainer takes one in place of its own, `from_pretrained(model, generation=engine)`, and calls
    its `update_weights(policy)` before it samples; `policy.state_dict()` has the weights.
    """

    @abstractmethod
    def generate(self, data: BatchedDataDict, greedy: bool = False) -> BatchedDataDict:
        """Completes a `GenerationDatumSpec` batch; gives a `GenerationOutputSpec` one, in order."""

    @abstractmethod
    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """Makes the engine ready; weights are those of the last update."""

    @abstractmethod
    def finish_generation(self, *args: Any, **kwargs: Any) -> None:
        """Gives back what the engine needs only while it generates."""
