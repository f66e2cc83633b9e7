"""The tokens behind the prompt of an episode, here or where engines have made them."""

from collections.abc import Sequence
from typing import Any

from nemo_rl_core.data.pretrained import decoded
from nemo_rl_core.rollouts.engine import CompletionResult, HeldResult, HeldTokens
from nemo_rl_core.types import Completion, Prompt


class TokensHere:
    """The policy's tokens, and the environment's between them, in this process.

    Args:
        prompt: Of the episode.
        tokenizer: Decodes the policy's turns.

    Attributes:
        last: The last token of the policy's last turn; None if that is empty.
    """

    def __init__(self, prompt: Prompt, tokenizer: Any) -> None:
        self._prompt, self._tokenizer = prompt, tokenizer
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._generated: list[bool] = []
        self._weight_versions: list[int] = []
        self.last: int | None = None

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def asked(self) -> tuple[tuple[int, ...], None]:
        """What the engine goes on from: all tokens, with the prompt's."""
        return self._prompt.token_ids + tuple(self._token_ids), None

    def add_completion(self, answer: CompletionResult) -> str:
        """Appends a turn of the policy, its tokens as they are; returns its text."""
        self._append(answer.token_ids, answer.logprobs, generated=True)
        self._weight_versions += answer.weight_versions
        self.last = answer.token_ids[-1] if answer.token_ids else None
        return decoded(self._tokenizer, answer.token_ids)

    def add_reply(self, token_ids: Sequence[int]) -> None:
        """Appends a turn of the environment, with the weights of the policy's turn before."""
        self._append(token_ids, [0.0] * len(token_ids), generated=False)
        if self._weight_versions:
            self._weight_versions += [self._weight_versions[-1]] * len(token_ids)

    def completion(self, *, truncated: bool, num_unread_tokens: int) -> Completion:
        """All of them, with what else a completion has."""
        return Completion(
            tuple(self._token_ids),
            tuple(self._logprobs),
            truncated,
            () if all(self._generated) else tuple(self._generated),
            tuple(self._weight_versions),
            num_unread_tokens,
        )

    def _append(
        self, token_ids: Sequence[int], logprobs: Sequence[float], *, generated: bool
    ) -> None:
        self._token_ids += token_ids
        self._logprobs += logprobs
        self._generated += [generated] * len(token_ids)


class TokensElsewhere:
    """As `TokensHere`, of tokens that lie where engines have made them.

    Args:
        prompt: Of the episode.

    Attributes:
        last: The last token of the policy's last turn; None if that is empty.
        whole: Prompt and turns up to the policy's last one; None before its first.
        num_written: How many tokens the policy wrote.
    """

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._reply: tuple[int, ...] = ()
        self.last: int | None = None
        self.whole: HeldTokens | None = None
        self.num_written = 0

    def __len__(self) -> int:
        length = 0 if self.whole is None else self.whole.length - len(self._prompt.token_ids)
        return length + len(self._reply)

    @property
    def asked(self) -> tuple[tuple[int, ...], HeldTokens | None]:
        """What the engine goes on from: the environment's last turn, and what it comes behind."""
        return (self._prompt.token_ids if self.whole is None else self._reply), self.whole

    def add_completion(self, answer: HeldResult) -> str:
        """Takes over a turn of the policy, which lies behind all before; returns its text."""
        self.whole, self._reply = answer.whole, ()
        self.num_written += answer.num_tokens
        self.last = answer.last_token
        return answer.text

    def add_reply(self, token_ids: Sequence[int]) -> None:
        """Keeps a turn of the environment for the next request."""
        self._reply = tuple(token_ids)
