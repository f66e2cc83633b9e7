"""Decoding: requests of a generation batch, sampling of their tokens, and their completions."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from nemo_rl_core.config.generation import SamplingConfig
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, flat_tensor
from nemo_rl_core.errors import ConfigError, DataError

_LARGEST_SEED = 2**31
_MAX_TOKENS_PER_CHARACTER = 4


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


class Decoding:
    """A batch of completions that grow one token at a time.

    The sampled token has the largest `p / e`, where `e` are exponential random numbers of the row's
    generator on the CPU (the Gumbel-max trick). A row's tokens therefore depend on its logits and
    its seed, not on other rows or the device. vLLM samples differently from the same seeds.

    Args:
        requests: The `B` rows to complete.
        stop_token_ids: Tokens that end a completion and are included in it.
        tokenizer: The model's tokenizer, required if a request has stop strings.
    """

    def __init__(
        self,
        requests: Sequence[DecodingRequest],
        config: SamplingConfig,
        *,
        greedy: bool,
        stop_token_ids: Collection[int],
        tokenizer: Any = None,
    ) -> None:
        from transformers import TopKLogitsWarper, TopPLogitsWarper

        if tokenizer is None:
            refuse_stop_strings_without_text(requests)
        self._requests, self._config, self._tokenizer = requests, config, tokenizer
        self._greedy = greedy or config.temperature == 0
        self._stops = frozenset(stop_token_ids)
        self._generators = [torch.Generator().manual_seed(request.seed) for request in requests]
        self._tokens: list[list[int]] = [[] for _ in requests]
        self._logprobs: list[list[float]] = [[] for _ in requests]
        self._truncated = [False] * len(requests)
        self.ended = torch.zeros(len(requests), dtype=torch.bool)
        self._warpers: list[Any] = []
        if not self._greedy and config.top_k is not None:
            self._warpers.append(TopKLogitsWarper(config.top_k))
        if not self._greedy and config.top_p < 1:
            self._warpers.append(TopPLogitsWarper(config.top_p))

    @torch.no_grad()
    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """Samples one token per row from logits `[B, V]`; undefined for rows that have ended."""
        logits = logits.float().cpu()
        scale = 1.0 if self._greedy else self._config.temperature
        penalty = self._config.repetition_penalty
        scores = (logits if penalty == 1 else self._penalized(logits, penalty)) / scale
        for warper in self._warpers:
            scores = warper(None, scores)
        if not self._greedy:
            noise = torch.empty_like(scores)
            for row, generator in zip(noise, self._generators, strict=True):
                row.exponential_(generator=generator)
            scores = scores.softmax(-1) / noise
        tokens = scores.argmax(-1)
        # Logprobs under the policy's full distribution, even if sampling truncates it.
        logprobs = torch.log_softmax(logits / scale, -1).gather(1, tokens[:, None])[:, 0]
        for row, (token, logprob) in enumerate(
            zip(tokens.tolist(), logprobs.tolist(), strict=True)
        ):
            if self.ended[row]:
                continue
            request = self._requests[row]
            self._tokens[row].append(token)
            self._logprobs[row].append(logprob)
            stopped = token in self._stops
            if request.stop_strings and not stopped:
                stopped = self._holds_stop_string(row, request.stop_strings)
            full = len(self._tokens[row]) >= request.max_new_tokens
            self._truncated[row] = full and not stopped
            self.ended[row] = stopped or full
        return tokens

    def _penalized(self, logits: torch.Tensor, penalty: float) -> torch.Tensor:
        seen = torch.zeros(logits.shape, dtype=torch.bool)
        for row, (request, tokens) in enumerate(zip(self._requests, self._tokens, strict=True)):
            seen[row, [*request.prompt, *tokens]] = True
        lowered = torch.where(logits > 0, logits / penalty, logits * penalty)
        return torch.where(seen, lowered, logits)

    def _holds_stop_string(self, row: int, strings: Sequence[str]) -> bool:
        # Earlier tokens were checked before, so only the tail is decoded. One character may consist
        # of several tokens.
        longest = max(map(len, strings)) + 1
        tail = self._tokens[row][-_MAX_TOKENS_PER_CHARACTER * longest :]
        text = self._tokenizer.decode(
            tail, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(string in text for string in strings)

    def completed(self) -> list[Completed]:
        """The completions, one per row."""
        rows = zip(self._tokens, self._logprobs, self._truncated, strict=True)
        return [Completed(*row) for row in rows]


def refuse_stop_strings_without_text(requests: Sequence[DecodingRequest]) -> None:
    """Raises `ConfigError` if a request has stop strings; call it without a tokenizer."""
    if any(request.stop_strings for request in requests):
        raise ConfigError(
            "stop strings are matched in text, but the engine has no tokenizer",
            expected="an engine with a tokenizer",
            got="stop_strings, and skip_tokenizer_init: true",
            fix="leave skip_tokenizer_init out",
        )
