"""Conversations for the template: turns with reasoning and calls of tools apart."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

_MARKED = re.compile(r"(<(tool|tool_call|think)>.*?</\2>)", re.DOTALL)


class Piece(NamedTuple):
    """A part of a turn: `text`, `thinking`, a `call` in the text, or the name of a function."""

    kind: str
    text: str = ""
    arguments: tuple[tuple[str, str], ...] = ()


class Turn(NamedTuple):
    """A turn; `about` names the tool and the call that it answers."""

    role: str
    about: str
    pieces: list[Piece]
    reward: float | None = None


def messages_of(value: object) -> list[dict[str, Any]]:
    """Returns a conversation, also from JSON text; empty for any other value.

    Example:
        >>> messages_of('[{"role": "user", "content": "2+2"}]'), messages_of("[2]")
        ([{'role': 'user', 'content': '2+2'}], [])
    """
    if isinstance(value, str) and value.startswith("["):
        value = _parsed(value)
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        return []
    return value if all("role" in each for each in value) else []


def turns(messages: Sequence[Mapping[str, Any]], rewards: Sequence[float] = ()) -> list[Turn]:
    """Returns the turns of a conversation; `rewards` are of the assistant's last turns."""
    reward_of = dict(zip(sampled_turns(messages, len(rewards)), rewards, strict=False))
    return [
        Turn(
            str(message["role"]),
            ", ".join(str(message[key]) for key in ("name", "tool_call_id") if message.get(key)),
            _pieces(message),
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
    thinking, calls = message.get("reasoning_content"), message.get("tool_calls")
    pieces = [Piece("thinking", _text(thinking))] if thinking else []
    content = _text(message.get("content"))
    # Each match has two groups: the part with its marks, and the name of the mark.
    for text, mark in zip(
        _MARKED.split(content)[::3], [*_MARKED.findall(content), ()], strict=True
    ):
        pieces += [Piece("text", text)] if text.strip() else []
        if mark and mark[1] == "think":
            pieces.append(Piece("thinking", mark[0][len("<think>") : -len("</think>")].strip()))
        elif mark:
            pieces.append(Piece("call", mark[0]))
    pieces += [_call(call) for call in (calls if isinstance(calls, list) else ())]
    return pieces or [Piece("text", content)]


def _call(call: object) -> Piece:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not function.get("name"):
        return Piece("call", _text(call))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    if not isinstance(arguments, dict):
        return Piece(str(function["name"]), _text(arguments))
    pairs = ((str(name), _text(value)) for name, value in arguments.items())
    return Piece(str(function["name"]), arguments=tuple(pairs))


def _parsed(text: str) -> Any:
    """Returns the value of JSON; other text is unchanged."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return text


def _text(value: object) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    line = json.dumps(value, ensure_ascii=False, default=str)
    return line if len(line) < 80 else json.dumps(value, indent=2, ensure_ascii=False, default=str)
