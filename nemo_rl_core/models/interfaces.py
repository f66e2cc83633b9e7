"""Interfaces of policies and generation engines, which custom classes may implement."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.functional.protocols import LossFunction

if TYPE_CHECKING:
    from pathlib import Path

    import torch


class GenerationDatumSpec(TypedDict):
    """Columns of a batch of prompts to complete.

    Attributes:
        input_ids: `[B, T]` prompts, padded on the right.
        input_lengths: `[B]` lengths of the prompts; required without `attention_mask`.
        attention_mask: `[B, T]`, 1 on the prompts; required without `input_lengths`.
        seeds: `[B]` seed of each row.
        stop_strings: `B` lists, or None, of texts that end a row's completion, in addition to the
            config's.
        max_new_tokens: `[B]` limits that are lower than the config's.
        __extra__: Anything else. A custom policy or engine gets a dict per row, which is empty;
            other engines return it unchanged.
    """

    input_ids: "torch.Tensor"
    input_lengths: NotRequired["torch.Tensor"]
    attention_mask: NotRequired["torch.Tensor"]
    seeds: NotRequired["torch.Tensor"]
    stop_strings: NotRequired[list[list[str] | None]]
    max_new_tokens: NotRequired["torch.Tensor"]
    __extra__: NotRequired[Any]


class GenerationOutputSpec(TypedDict):
    """Columns of a batch of completions.

    Attributes:
        output_ids: `[B, T']` prompts and completions, padded on the right.
        generation_lengths: `[B]` numbers of tokens of the completions.
        unpadded_sequence_lengths: `[B]` numbers of tokens of prompts and completions.
        logprobs: `[B, T']` logprobs of the completions' tokens in nats, 0 elsewhere; greedy
            completions have those of temperature 1. A custom engine may leave them out.
        truncated: `[B]`, whether a limit ended the completion, not a stop token or string. A custom
            engine may leave it out.
        __extra__: Anything else that a custom engine returns; a trainer does not read it.
    """

    output_ids: "torch.Tensor"
    generation_lengths: "torch.Tensor"
    unpadded_sequence_lengths: "torch.Tensor"
    logprobs: NotRequired["torch.Tensor"]
    truncated: NotRequired["torch.Tensor"]
    __extra__: NotRequired[Any]


class TrainingDatumSpec(TypedDict):
    """Columns of a training batch; a loss may read others.

    Attributes:
        input_ids: `[B, T]` sequences, padded on the right.
        input_lengths: `[B]` lengths of the sequences; required without `attention_mask`.
        attention_mask: `[B, T]`, 1 on the tokens of a row; required without `input_lengths`.
        token_mask: `[B, T-1]`, 1 where the next token is trained on; by default everywhere.
        sample_mask: `[B]`, 1 for rows that are trained on; by default all.
    """

    input_ids: "torch.Tensor"
    input_lengths: NotRequired["torch.Tensor"]
    attention_mask: NotRequired["torch.Tensor"]
    token_mask: NotRequired["torch.Tensor"]
    sample_mask: NotRequired["torch.Tensor"]


class LogprobsSpec(TypedDict):
    """Output of `get_logprobs`.

    Attributes:
        logprobs: `[B, T-1]` logprobs of the next tokens in nats, 0 where `token_mask` is not set.
    """

    logprobs: "torch.Tensor"


class PolicyInterface(ABC):
    """A model that can be trained, and that computes logprobs or, with a scalar head, values.

    Only `train` is required. Implement the other methods that your algorithm calls: PPO asks a
    critic for values, distillation asks a teacher for its likeliest tokens. A trainer accepts such
    a policy instead of a model, `GRPOTrainer(policy, model=...)`.
    """

    @abstractmethod
    def train(self, data: BatchedDataDict, loss_fn: LossFunction) -> dict[str, Any]:
        """Makes one optimizer step on the complete batch; returns its metrics.

        Args:
            data: `input_ids [B, T]`, `input_lengths [B]`, `token_mask [B, T-1]`, `sample_mask [B]`
                and the columns that the loss reads. Rows with equal `pair_ids [B]` reach the loss
                together; `topk_ids [B, T-1, K]` reach it with `current_topk_logprobs`.
            loss_fn: A `LossFunction`, which may be a plain function with that signature.
        """

    def generate(self, data: BatchedDataDict, greedy: bool = False) -> BatchedDataDict:
        """Completes `input_ids [B, T]`; a `GenerationInterface` does so faster."""
        raise NotImplementedError(f"{type(self).__name__} has no generate")

    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """Returns `logprobs [B, T-1]` of the next tokens where `token_mask` is set, else 0."""
        raise NotImplementedError(f"{type(self).__name__} has no get_logprobs")

    def get_reference_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """Returns the logprobs of `get_logprobs` under the reference policy."""
        raise NotImplementedError(f"{type(self).__name__} has no get_reference_logprobs")

    def get_reference_topk_logprobs(self, data: BatchedDataDict, k: int) -> BatchedDataDict:
        """Returns `topk_ids` and `topk_logprobs [B, T-1, k]`, likeliest first; 0 where masked."""
        raise NotImplementedError(f"{type(self).__name__} has no get_reference_topk_logprobs")

    def get_values(self, data: BatchedDataDict) -> BatchedDataDict:
        """Returns `values [B, T]` of the prefix up to each token, and 0 in the padding."""
        raise NotImplementedError(f"{type(self).__name__} has no get_values")

    def save_checkpoint(self, path: "Path") -> None:
        """Writes the weights to `path/model`, and the state of training to `path`.

        A trainer calls it at each save; without it a run keeps no weights.
        """
        raise NotImplementedError(f"{type(self).__name__} has no save_checkpoint")

    def load_checkpoint(self, path: "Path") -> None:
        """Resumes from the files of `save_checkpoint`."""
        raise NotImplementedError(f"{type(self).__name__} has no load_checkpoint")


class GenerationInterface(ABC):
    """An engine that completes prompts.

    A trainer accepts one instead of its built-in engine, `from_pretrained(model,
    generation=engine)`. Before it samples, the trainer calls the engine's method
    `update_weights(policy)` or `update_weights(state_dict)`, by the name of the parameter. An
    engine without this method must return `logprobs`, which are compared with the policy's.
    """

    @abstractmethod
    def generate(self, data: BatchedDataDict, greedy: bool = False) -> BatchedDataDict:
        """Completes a `GenerationDatumSpec` batch; returns a `GenerationOutputSpec`, in order."""

    @abstractmethod
    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """Makes the engine ready, with the weights of the last update."""

    @abstractmethod
    def finish_generation(self, *args: Any, **kwargs: Any) -> None:
        """Frees the resources that the engine needs only during generation."""
