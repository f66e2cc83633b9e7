"""Conversations as lists of turns: storage and validation."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Turn = dict[str, Any]
"""`role`, `content`, and other keys of chat templates, such as `tool_calls`."""

_FOLLOWS = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "calling assistant": ("tool",),
    "tool": ("tool", "assistant"),
}
"""Roles that may follow a role; None is the start."""

_ROLES = ("system", "user", "assistant", "tool")


def turns_of(value: Any) -> list[Turn] | None:
    """Returns the turns of a value: a list of mappings with roles, or the JSON of such a list.

    Keys with null values (which arrow adds to every turn if one turn has them) are dropped.

    Returns:
        The turns, or None if the value is not a conversation, such as plain text.

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
    """A conversation as JSON; other values (plain text, or a fault for the schema) unchanged."""
    turns = turns_of(value)
    return value if turns is None else json.dumps(turns, ensure_ascii=False)


def as_turns(value: Any, *, role: str) -> list[Turn]:
    """The turns of a conversation, or plain text as one turn of that role."""
    turns = turns_of(value)
    return [{"role": role, "content": value}] if turns is None else turns


def fault(turns: Sequence[Turn] | None) -> str | None:
    """Describes the first fault of a conversation, which must end with the assistant's turn.

    A system turn may only come first; user and assistant alternate; tool turns follow an
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
