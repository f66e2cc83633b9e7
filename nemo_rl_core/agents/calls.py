"""Calls of an agent in a form that no dialect has, and their results."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from nemo_rl_core.data.turns import Turn

_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0, "repetition_penalty": 1.0}
"""Values that leave the policy's distribution unchanged; those of other settings are 0."""


class RefusedError(Exception):
    """A call that is refused.

    Args:
        code: Name of the reason in OpenAI's dialects.
        param: Name of the field that is refused.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_value",
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


def ended() -> RefusedError:
    """Returns the refusal of a call after its episode."""
    text = "the episode has ended: calls are answered only until the agent returns"
    return RefusedError(text, status=410, code="episode_ended")  # clients repeat calls after 409


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of a call.

    Attributes:
        max_new_tokens: Maximum number of new tokens; None uses that of the run.
        reads_calls: Whether the result has the tool calls of the policy's text.
        sampling: Settings of the distribution by name; those of the run are accepted.
        previous: Id of an earlier choice, perhaps with a prefix, that the turns continue.
        idempotency_key: Name of the call that its repetitions share.
        is_retry: Whether the client names the call as a repetition.
    """

    num_choices: int = 1
    max_new_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    reads_calls: bool = True
    has_parallel_calls: bool = True
    sampling: Mapping[str, Any] = field(default_factory=dict)
    previous: str | None = None
    idempotency_key: str | None = None
    is_retry: bool = False

    @property
    def of_result(self) -> tuple[Any, ...]:
        """The options that the result depends on."""
        limits = self.num_choices, self.max_new_tokens, self.stop_strings
        return *limits, self.reads_calls, self.has_parallel_calls

    def refuse_other_sampling(self, sampling: Mapping[str, float]) -> None:
        """Raises `RefusedError` if a setting differs from the run's."""
        for name, value in self.sampling.items():
            run_value = sampling.get(name, _NEUTRAL.get(name, 0))
            is_unset = value is None or value == {} or (name == "top_k" and value == -1)
            if not (is_unset or value == run_value):
                raise RefusedError(
                    f"{name} is {value!r}, but this run samples and trains at {run_value!r}: "
                    f"leave {name} out",
                    param=name,
                )


@dataclass(frozen=True, slots=True, eq=False)
class SampledChoice:
    """A turn of the policy.

    Attributes:
        finish_reason: `stop`, `length` or `tool_calls`.
        stop_string: Stop string of the call that ended the turn.
        token_ids: `[L]` array.
        logprobs: `[L]` array of logprobs in nats.
    """

    id: str
    turn: Turn
    finish_reason: str
    stop_string: str | None
    token_ids: "np.ndarray[Any, np.dtype[np.int64]]"
    logprobs: "np.ndarray[Any, np.dtype[np.float32]]"


@dataclass(frozen=True, slots=True)
class ChatResult:
    """The result of a call."""

    num_prompt_tokens: int
    choices: tuple[SampledChoice, ...]

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens of all choices."""
        return sum(len(each.token_ids) for each in self.choices)


def digest(*parts: Any) -> bytes:
    """Returns 16 bytes that identify JSON values, or the digests of some."""
    texts = [part.hex() if isinstance(part, bytes) else part for part in parts]
    return blake2b(json.dumps(texts, sort_keys=True).encode(), digest_size=16).digest()


def prefix_digests(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Returns the digests of the first 0, 1, 2, ... turns, equal for the same normalized turns.

    Ignored are what clients change when they send a turn again: white space at the ends, null and
    empty contents, the text of JSON arguments, ids of calls, and reasoning, which `agrees` checks.
    """
    digests = [digest([*tools])]
    for turn in turns:
        digests.append(extended(digests[-1], turn))
    return digests


def extended(before: bytes, turn: Turn) -> bytes:
    """Returns the digest of a conversation and another turn."""
    role = "system" if turn["role"] == "developer" else turn["role"]
    functions = [call["function"] for call in turn.get("tool_calls", ())]
    calls = [[each["name"], _plain(each.get("arguments", {}))] for each in functions]
    name = turn.get("name") if role == "user" else None
    return digest(before, [role, turn["content"].strip(), calls, name])


def agreement(turn: Turn, sampled: Turn) -> int | None:
    """Compares what `prefix_digests` ignores.

    Returns:
        The number of equal ids and reasonings; None if another reasoning excludes that the turn is
        the sampled one.
    """
    reasoning = turn.get("reasoning_content", "").strip()
    if reasoning and reasoning != sampled.get("reasoning_content", "").strip():
        return None
    ids, sampled_ids = (
        [call.get("id") for call in each.get("tool_calls", ())] for each in (turn, sampled)
    )
    return bool(reasoning) + sum(map(str.__eq__, map(str, ids), map(str, sampled_ids)))


def _plain(value: Any) -> Any:
    """Returns a JSON value with one form of each number: some clients write 1.0 as 1."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
