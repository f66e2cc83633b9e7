"""Conversations for the template: turns with reasoning and calls of tools apart."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_MARKED = re.compile(r"(<(tool|tool_call|think)>.*?</\2>)", re.DOTALL)
_LINE = 80
"""Maximum length of JSON on one line."""


@dataclass(frozen=True)
class Piece:
    """A part of a turn.

    Attributes:
        kind: `text`, `thinking`, `call` (a call in the text), or the name of a called function.
        arguments: Name and value of each argument of a called function.
    """

    kind: str
    text: str = ""
    arguments: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Turn:
    """A turn of a conversation.

    Attributes:
        about: Name of the tool or speaker, and id of the call that a result answers.
        reward: Reward of a sampled turn, if turns have rewards.
    """

    role: str
    about: str
    pieces: tuple[Piece, ...]
    reward: float | None = None


def messages_of(value: object) -> list[dict[str, Any]]:
    """Returns a conversation, also from JSON text; empty for any other value.

    Example:
        >>> messages_of('[{"role": "user", "content": "2+2"}]'), messages_of("[2]")
        ([{'role': 'user', 'content': '2+2'}], [])
    """
    if isinstance(value, str) and value.startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
    is_conversation = isinstance(value, list) and all(
        isinstance(each, dict) and "role" in each for each in value
    )
    return value if is_conversation else []  # type: ignore[return-value]


def turns(messages: Sequence[Mapping[str, Any]], rewards: Sequence[float] = ()) -> list[Turn]:
    """Returns the turns of a conversation.

    Args:
        rewards: Rewards of the last turns of the assistant, which were sampled.
    """
    sampled = sampled_turns(messages, len(rewards))
    reward_of = dict(zip(sampled, rewards, strict=True)) if sampled else {}
    return [
        Turn(
            str(message["role"]),
            ", ".join(str(message[key]) for key in ("name", "tool_call_id") if message.get(key)),
            tuple(_pieces(message)),
            reward_of.get(index),
        )
        for index, message in enumerate(messages)
    ]


def sampled_turns(messages: Sequence[Mapping[str, Any]], count: int) -> list[int]:
    """Returns the indices of the last `count` turns of the assistant; empty if it has fewer."""
    every = [index for index, each in enumerate(messages) if each["role"] == "assistant"]
    return every[len(every) - count :] if 0 < count <= len(every) else []


def plain(messages: Sequence[Mapping[str, Any]]) -> str:
    """Returns a conversation as text, one paragraph for each turn."""
    return "\n".join(f"{each['role']}: {_text(each.get('content'))}" for each in messages)


def _pieces(message: Mapping[str, Any]) -> list[Piece]:
    thinking = message.get("reasoning_content")
    pieces = [Piece("thinking", _text(thinking))] if thinking else []
    content = _text(message.get("content"))
    # Each match has two groups: the part with its marks, and the name of the mark.
    for index, text in enumerate(_MARKED.split(content)):
        mark = _MARKED.fullmatch(text)
        if index % 3 == 2 or not text.strip():
            continue
        if mark and mark[2] == "think":
            pieces.append(Piece("thinking", text[len("<think>") : -len("</think>")].strip()))
        else:
            pieces.append(Piece("call" if mark else "text", text))
    calls = message.get("tool_calls")
    pieces += [_call(call) for call in (calls if isinstance(calls, list) else ())]
    return pieces or [Piece("text", content)]


def _call(call: object) -> Piece:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not function.get("name"):
        return Piece("call", _text(call))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # shown as it was sampled
            arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        return Piece(str(function["name"]), _text(arguments))
    pairs = tuple((str(name), _text(value)) for name, value in arguments.items())
    return Piece(str(function["name"]), arguments=pairs)


def _text(value: object) -> str:
    """Returns a text as it is, the texts of a list of parts, and any other value as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        texts = [part.get("text") for part in value]
        if all(isinstance(text, str) for text in texts):
            return "\n".join(map(str, texts))
    line = json.dumps(value, ensure_ascii=False, default=str)
    if len(line) <= _LINE:
        return line
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)
