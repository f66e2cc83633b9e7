"""Conversion of generation batches into requests, and of completions into batches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from nemo_rl_core.config.generation import SamplingConfig
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, flat_tensor
from nemo_rl_core.errors import DataError

_LARGEST_SEED = 2**31


@dataclass(frozen=True)
class DecodingRequest:
    """One row of a generation batch.

    Attributes:
        seed: Seed of this row, so that its tokens do not depend on other rows.
        max_new_tokens: Maximum number of tokens in the completion, stop token included.
        stop_strings: Strings that end the completion when they appear in its text.
    """

    prompt: list[int]
    seed: int
    max_new_tokens: int
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Completed:
    """The completion of one prompt: `L` tokens, their logprobs, and whether it was truncated."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    truncated: bool


def read_requests(
    batch: BatchedDataDict, config: SamplingConfig, *, max_model_len: int
) -> list[DecodingRequest]:
    """Returns one request per row of a batch.

    Args:
        batch: `input_ids [B, T]` padded on the right, `input_lengths [B]`, `seeds [B]`, and
            optionally `stop_strings` (B lists of strings, or None) and `max_new_tokens [B]`.
        config: Settings of all rows. A row adds stop strings and may have a lower limit.
        max_model_len: Maximum number of tokens of a prompt and its completion.

    Raises:
        DataError: If a row has no prompt, or its prompt leaves no room for a completion.
    """
    lengths = batch["input_lengths"].tolist()
    limits = batch["max_new_tokens"].tolist() if "max_new_tokens" in batch else None
    stops = batch.get("stop_strings") or [None] * len(lengths)
    requests = []
    for row, length in enumerate(lengths):
        most = config.max_new_tokens if limits is None else min(config.max_new_tokens, limits[row])
        room = min(most, max_model_len - length)
        if length < 1 or room < 1:
            raise DataError(
                f"row {row} of a generation batch cannot be completed",
                expected=f"a prompt of 1 to {max_model_len - 1} tokens (max_model_len is "
                f"{max_model_len}), and at least 1 new token",
                got=f"{length} tokens, and at most {most} new ones",
                fix="shorten the prompt, or raise max_model_len or max_new_tokens",
            )
        requests.append(
            DecodingRequest(
                prompt=batch["input_ids"][row, :length].tolist(),
                seed=int(batch["seeds"][row]),
                max_new_tokens=room,
                stop_strings=(*config.stop_strings, *(stops[row] or ())),
            )
        )
    return requests


def samples_of_a_prompt(requests: Sequence[DecodingRequest]) -> list[list[DecodingRequest]]:
    """Groups consecutive requests that are samples of one prompt.

    Requests of a group differ only in their seeds, which are consecutive.

    Example:
        >>> rows = [DecodingRequest([5], seed, 8) for seed in (7, 8, 9, 7)]
        >>> [[row.seed for row in group] for group in samples_of_a_prompt(rows)]
        [[7, 8, 9], [7]]
    """
    groups: list[list[DecodingRequest]] = []
    for request in requests:
        if groups and request == replace(groups[-1][-1], seed=groups[-1][-1].seed + 1):
            groups[-1].append(request)
        else:
            groups.append([request])
    return groups


def padded_on_the_left(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `[B, T]` ids padded on the left, and a mask that is 1 at prompt tokens.

    Example:
        >>> padded_on_the_left([[5, 6], [7]])[0].tolist()
        [[5, 6], [0, 7]]
    """
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids, mask


def row_seeds(seed: int, num_rows: int) -> torch.Tensor:
    """Returns `[B]` seeds derived from one seed, for a batch without seeds."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(_LARGEST_SEED, (num_rows,), generator=generator)


def as_batch(
    requests: Sequence[DecodingRequest], completed: Sequence[Completed]
) -> BatchedDataDict:
    """Concatenates prompts and completions, padded on the right with 0.

    Returns:
        `output_ids [B, T']`, `generation_lengths [B]`, `unpadded_sequence_lengths [B]`,
        `logprobs [B, T']` of the completions' tokens (0 elsewhere), `truncated [B]`.
    """
    starts = torch.tensor([len(request.prompt) for request in requests], dtype=torch.long)
    lengths = torch.tensor([len(done.token_ids) for done in completed], dtype=torch.long)
    ends = starts + lengths
    positions = torch.arange(int(ends.max()) if len(ends) else 0)
    is_token = positions < ends[:, None]
    output_ids = torch.zeros(is_token.shape, dtype=torch.long)
    logprobs = torch.zeros(is_token.shape)
    pairs = zip(requests, completed, strict=True)
    rows = (chain(request.prompt, done.token_ids) for request, done in pairs)
    output_ids[is_token] = flat_tensor(rows, np.int64)
    is_generated = is_token & (positions >= starts[:, None])
    logprobs[is_generated] = flat_tensor((done.logprobs for done in completed), np.float32)
    return BatchedDataDict(
        {
            "output_ids": output_ids,
            "generation_lengths": lengths,
            "unpadded_sequence_lengths": ends,
            "logprobs": logprobs,
            "truncated": torch.tensor([done.truncated for done in completed], dtype=torch.bool),
        }
    )
