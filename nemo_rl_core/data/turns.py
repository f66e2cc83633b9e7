"""Conversations as lists of turns: normalization, storage and validation."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl_core.data.json_values import json_default, parsed, without_padding

Turn = dict[str, Any]
"""`role`, `content`, and other keys of chat templates, such as `tool_calls`."""

_FOLLOWS = {
    None: ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("user", "assistant"),
    "assistant": ("user", "assistant", "tool"),  # a call may be in the text
    "calling assistant": ("tool",),
    "tool": ("tool", "assistant", "user"),
}
"""Roles that may follow a role; None is the start."""

_ROLES = ("system", "developer", "user", "assistant", "tool")

_TEXT_PARTS = ("text", "input_text", "output_text")
_PART_KEYS = {"cache_control", "annotations"}
"""Keys of text parts that templates ignore."""

_PLAIN_KEYS = {"role", "content"}

FLAG = "train"
"""Whether a turn is trained on; templates never get this key."""

FLAGS = (
    *(FLAG, "training", "trainable", "is_trainable", "train_on_turn", "weight"),
    *("loss", "loss_mask", "step_loss_mask", "loss_weight", "loss_scale", "masked", "ignore"),
)
"""Names of the flag in other trainers."""
_OPPOSITE = ("masked", "ignore")

_ARGUMENTS = ("arguments", "parameters", "input", "args")
"""Keys of a call's arguments: OpenAI, Llama 3, Anthropic and LangChain."""

OTHER_CALLS = ("function_calls", "functions")
"""Keys with calls and definitions of tools as text, in data of OLMo 3; its template writes them."""

_SPANS = "train_detail"
"""Key of the spans of a turn that Axolotl trains on."""


def turns_of(value: Any) -> list[Turn] | None:
    """Returns the turns of a value: a list of mappings with roles, or the JSON of such a list.

    Keys of a turn with null values are dropped, and so is an empty system turn. Text parts become
    text. Tool calls get the form `{"type": "function", "function": {"name": ..., "arguments":
    {...}}}`, also those of the earlier key `function_call`. Flags such as `weight` become the key
    `train`.

    Returns:
        The turns, or None if the value is not a conversation, such as plain text.

    Example:
        >>> turns_of('[{"role": "user", "content": "2+2", "name": null}]')
        [{'role': 'user', 'content': '2+2'}]
        >>> turns_of("2+2") is None
        True
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parsed(value, list)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        return None
    if not all(isinstance(turn, Mapping) and "role" in turn for turn in value):
        return None
    turns = [_turn(turn) for turn in value]
    return turns[1:] if len(turns) > 1 and _is_empty_system(turns[0]) else turns


def stored(value: Any) -> Any:
    """Returns a conversation as JSON; other values are unchanged, and the schema checks them."""
    turns = turns_of(value)
    return value if turns is None else json.dumps(turns, ensure_ascii=False, default=json_default)


def as_turns(value: Any, *, role: str) -> list[Turn]:
    """Returns the turns of a conversation, or plain text as one turn of that role."""
    turns = turns_of(value)
    return [{"role": role, "content": value}] if turns is None else turns


def fault(turns: Sequence[Turn] | None) -> str | None:
    """Describes the first fault of a conversation, which must end with the assistant's turn.

    Only the first turn may be a system or developer turn. Tool turns follow an assistant's turn,
    whose text may be empty if it has `tool_calls`. Users and assistants may have several turns in a
    row, if the chat template writes them.

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
        if wrong := _content_fault(turn) or _call_fault(calls) or _flag_fault(turn):
            return wrong
        before = "calling assistant" if role == "assistant" and calls else role
    return None if turns[-1]["role"] == "assistant" else "does not end with an assistant turn"


def num_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Returns the number of items with which both sequences begin."""
    differs = (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differs, min(len(one), len(other)))


def is_trained(turn: Turn) -> bool:
    """Whether a turn is the assistant's and not flagged otherwise."""
    return turn["role"] == "assistant" and turn.get(FLAG, True) is True


def _turn(turn: Mapping[str, Any]) -> Turn:
    if turn.keys() == _PLAIN_KEYS and isinstance(turn["content"], str) and turn["role"] in _ROLES:
        return {**turn}  # most turns
    cleaned = _flagged({str(key): value for key, value in turn.items() if value is not None})
    if "content" in cleaned:
        cleaned["content"] = _text_of_parts(cleaned["content"])
    if cleaned["role"] in ("function", "environment"):
        cleaned["role"] = "tool"
    if cleaned.get("function_calls"):
        cleaned.setdefault("content", "")
    call = cleaned.get("function_call")
    if isinstance(call, Mapping) and call.get("name"):
        cleaned["tool_calls"] = cleaned.get("tool_calls") or [call]
    if not call or cleaned.get("tool_calls"):
        cleaned.pop("function_call", None)
    calls = parsed(cleaned.pop("tool_calls", None), list)
    if not calls:
        return cleaned
    if isinstance(calls, list):
        calls = [_call(item) for item in calls]
    return {**cleaned, "content": cleaned.get("content", ""), "tool_calls": calls}


def _is_empty_system(turn: Turn) -> bool:
    is_system = turn["role"] in ("system", "developer")
    content = turn.get("content", "")
    return is_system and isinstance(content, str) and not content.strip()


def _text_of_parts(content: Any) -> Any:
    """Joins content in text parts without a separator, like chat templates."""
    if not isinstance(content, list) or not content:
        return content
    texts = []
    for part in content:
        filled = without_padding(dict(part)) if isinstance(part, Mapping) else {}
        if filled.keys() - _PART_KEYS != {"type", "text"} or filled["type"] not in _TEXT_PARTS:
            return content
        texts.append(filled["text"])
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content


def _call(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if "function" not in call and "name" in call:
        inner = {key: call[key] for key in ("name", *_ARGUMENTS) if key in call}
        others = {key: call[key] for key in call if key not in inner and key != "type"}
        return _call({"type": "function", **others, "function": inner})
    function = call.get("function")
    names = [key for key in _ARGUMENTS if isinstance(function, Mapping) and key in function]
    if not isinstance(function, Mapping) or not names:
        return dict(call)
    # A null or an empty text is padding.
    name = next((key for key in names if function[key] not in (None, "")), names[0])
    # Templates write arguments as JSON, so JSON text would be encoded twice.
    empty = function[name] in (None, "")
    arguments = {} if empty else parsed(function[name], Mapping)
    others = {key: value for key, value in function.items() if key != name}
    return {**call, "function": {**others, "arguments": arguments}}


def _content_fault(turn: Turn) -> str | None:
    content = turn.get("content")
    if not isinstance(content, str):
        return "has a turn whose content is not text"
    may_be_empty = turn.get("tool_calls") or turn.get("function_calls") or turn["role"] == "tool"
    return None if content.strip() or may_be_empty else "has an empty turn"


def _call_fault(calls: Any) -> str | None:
    if calls is not None and not isinstance(calls, list):
        return "has tool_calls that are not a list"
    for call in calls or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return "has a tool call without function.name"
        if not isinstance(function.get("arguments", {}), Mapping):
            return "has a tool call whose arguments are not a JSON object"
    return None


def _flagged(turn: Turn) -> Turn:
    """Merges the flags of a turn into one; unreadable flags stay for `fault`."""
    flags = {name: turn[name] for name in FLAGS if name in turn}
    if any(value not in (0, 1) for value in flags.values()):
        return turn
    meanings = {bool(value) != (name in _OPPOSITE) for name, value in flags.items()}
    if len(meanings) != 1:
        return turn
    others = {key: value for key, value in turn.items() if key not in flags}
    return {**others, FLAG: meanings.pop()}


def _flag_fault(turn: Turn) -> str | None:
    if turn.get(_SPANS):
        return f"has {_SPANS}, but a turn is trained on in full or not at all"
    if "mask" in turn:
        value = f"{turn['mask']!r:.20}"
        return f"has a turn with mask {value}, which is ambiguous between trainers: write {FLAG}"
    flags = {name: turn[name] for name in FLAGS if name in turn}
    if [*flags] not in ([], [FLAG]) or not isinstance(turn.get(FLAG, True), bool):
        flag_texts = ", ".join(f"{name} {value!r:.20}" for name, value in flags.items())
        return f"has a turn with {flag_texts}: flags must be 0, 1, false or true, and agree"
    if turn.get(FLAG) and turn["role"] != "assistant":
        return f"marks a {turn['role']} turn for training, but only assistant turns are trained on"
    return None
