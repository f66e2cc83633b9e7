"""Conversations as lists of turns: how they are stored, and what is wrong with them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Turn = dict[str, Any]
"""`role`, `content`, and what else a chat template reads, such as `tool_calls`."""

_FOLLOWS = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "calling assistant": ("tool",),
    "tool": ("tool", "assistant"),
}
"""Which roles may stand behind a role; None is the start."""

_ROLES = ("system", "user", "assistant", "tool")


def turns_of(value: Any) -> list[Turn] | None:
    """The turns that a value holds: a list of mappings with roles, or the JSON of such a list.

    Keys without a value (which arrow adds to every turn where one turn has them) are left out.

    Returns:
        The turns, or None where the value is no conversation, such as plain text.

    Example:
        >>> turns_of('[{"role": "user", "content": "2+2", "name": null}]')
        [{'role': 'user', 'content': '2+2'}]
        >>> turns_of("2+2") is None
        True
    """
    if isinstance(value, str):
        if not value.lstrip().startswith("["):
            return None
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        return None
    if not all(isinstance(turn, Mapping) and "role" in turn for turn in value):
        return None
    return [_turn(turn) for turn in value]


def stored(value: Any) -> Any:
    """A conversation as JSON; anything else (plain text, or a fault for the schema) as it is."""
    turns = turns_of(value)
    return value if turns is None else json.dumps(turns, ensure_ascii=False)


def as_turns(value: Any, *, role: str) -> list[Turn]:
    """The turns of a conversation, or plain text as one turn of that role."""
    turns = turns_of(value)
    return [{"role": role, "content": value}] if turns is None else turns


def fault(turns: Sequence[Turn] | None) -> str | None:
    """What is wrong with a conversation that ends with the assistant, in a few words.

    A system turn comes first if at all; user and assistant take turns; tool turns stand behind an
    assistant's turn with `tool_calls`, whose text may be empty.

    Example:
        >>> fault([{"role": "user", "content": "2+2"}])
        'does not end with an assistant turn'
    """
    if not turns:
        return "is not a list of messages"
    before: str | None = None
    for turn in turns:
        role, calls = turn.get("role"), turn.get("tool_calls")
        if role not in _ROLES:
            return f"has the role {str(role)[:20]!r}, not one of {', '.join(_ROLES)}"
        if role not in _FOLLOWS[before]:
            return f"has role {role!r} after {before!r}" if before else f"begins with role {role!r}"
        content = turn.get("content")
        if not isinstance(content, str):
            return "has a turn whose content is not text"
        if not content.strip() and not calls:
            return "has an empty turn"
        before = "calling assistant" if role == "assistant" and calls else role
    return None if turns[-1]["role"] == "assistant" else "does not end with an assistant turn"


def _turn(turn: Mapping[str, Any]) -> Turn:
    kept = {str(key): value for key, value in turn.items() if value is not None}
    if kept.get("tool_calls"):
        return {**kept, "content": kept.get("content", "")}
    return {key: value for key, value in kept.items() if key != "tool_calls"}
