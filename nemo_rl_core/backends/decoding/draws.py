"""Sampling of tokens from logits, with a separate seed per row, until each row has ended."""

from collections.abc import Collection, Sequence
from typing import Any

import torch

from nemo_rl_core.backends.decoding.requests import Completed, DecodingRequest
from nemo_rl_core.config.generation import SamplingConfig
from nemo_rl_core.errors import ConfigError

_MAX_TOKENS_PER_CHARACTER = 4


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

        refuse_stop_strings_without_text(requests, tokenizer)
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
        scores = self._penalized(logits) / scale
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
            if not self.ended[row]:
                self._add(row, token, logprob)
        return tokens

    def _penalized(self, logits: torch.Tensor) -> torch.Tensor:
        penalty = self._config.repetition_penalty
        if penalty == 1:
            return logits
        seen = torch.zeros(logits.shape, dtype=torch.bool)
        for row, (request, tokens) in enumerate(zip(self._requests, self._tokens, strict=True)):
            seen[row, [*request.prompt, *tokens]] = True
        lowered = torch.where(logits > 0, logits / penalty, logits * penalty)
        return torch.where(seen, lowered, logits)

    def _add(self, row: int, token: int, logprob: float) -> None:
        self._tokens[row].append(token)
        self._logprobs[row].append(logprob)
        stopped = token in self._stops or self._holds_stop_string(row)
        full = len(self._tokens[row]) >= self._requests[row].max_new_tokens
        self._truncated[row] = full and not stopped
        self.ended[row] = stopped or full

    def _holds_stop_string(self, row: int) -> bool:
        strings = self._requests[row].stop_strings
        if not strings:
            return False
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


def refuse_stop_strings_without_text(requests: Sequence[DecodingRequest], tokenizer: Any) -> None:
    """Raises `ConfigError` if a request has stop strings and there is no tokenizer."""
    if tokenizer is None and any(request.stop_strings for request in requests):
        raise ConfigError(
            "stop strings are matched in text, but the engine has no tokenizer",
            expected="an engine with a tokenizer",
            got="stop_strings, and skip_tokenizer_init: true",
            fix="leave skip_tokenizer_init out",
        )
