"""Conversations for the template: turns with reasoning and calls of tools apart."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nemo_rl_core.data.json_values import parsed

_MARKS = ("tool", "tool_call", "think")
_OPENING = re.compile(f"<({'|'.join(_MARKS)})>")


class Piece(NamedTuple):
    """A part of a turn: `text`, `thinking` or a `call`, which may have a name and arguments."""

    kind: str
    text: str = ""
    name: str = ""
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
        value = parsed(value, list)
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
    last = {mark: content.rfind(f"</{mark}>") for mark in _MARKS}
    end = 0
    for opening in _OPENING.finditer(content):
        if opening.start() < end or opening.end() > last[opening[1]]:
            continue  # part of the previous piece, or never closed
        pieces += _texts(content[end : opening.start()])
        close = content.index(closing := f"</{opening[1]}>", opening.end())
        end = close + len(closing)
        if opening[1] == "think":
            pieces.append(Piece("thinking", content[opening.end() : close].strip()))
        else:
            pieces.append(Piece("call", content[opening.start() : end]))
    pieces += _texts(content[end:])
    pieces += [_call(call) for call in (calls if isinstance(calls, list) else ())]
    return pieces or [Piece("text", content)]


def _texts(text: str) -> list[Piece]:
    return [Piece("text", text)] if text.strip() else []


def _call(call: object) -> Piece:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not function.get("name"):
        return Piece("call", _text(call))
    arguments = parsed(function.get("arguments"), dict)
    if not isinstance(arguments, dict):
        return Piece("call", _text(arguments), str(function["name"]))
    pairs = ((str(name), _text(value)) for name, value in arguments.items())
    return Piece("call", name=str(function["name"]), arguments=tuple(pairs))


def _text(value: object) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    line = json.dumps(value, ensure_ascii=False, default=str)
    return line if len(line) < 80 else json.dumps(value, indent=2, ensure_ascii=False, default=str)
