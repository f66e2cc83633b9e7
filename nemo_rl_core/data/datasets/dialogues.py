"""Conversations in one text, as in HH-RLHF: `\\n\\nHuman: ...\\n\\nAssistant: ...`."""

import re
from collections.abc import Mapping
from typing import Any

from nemo_rl_core.data.json_values import parsed
from nemo_rl_core.data.turns import Turn

_MARK = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
BEGINNINGS = ("\n\nHuman:", "Human:")
"""Prefixes of texts that may be dialogues."""


def as_dialogue(value: Any, *, is_prompt: bool = False) -> Any:
    """Returns the turns of a dialogue text or of another list format; other values unchanged.

    Args:
        is_prompt: Whether to remove an empty assistant turn at the end, which asks for the answer.

    Example:
        >>> [turn["content"] for turn in as_dialogue("\\n\\nHuman: Hi\\n\\nAssistant: Hello.")]
        ['Hi', 'Hello.']
        >>> as_dialogue("Human: is it so?")
        'Human: is it so?'
    """
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        if "from" in value[0]:
            return [sharegpt_turn(turn) for turn in value]
        if value[0].keys() == {"input", "output"}:  # Capybara
            texts = [(("user", turn["input"]), ("assistant", turn["output"])) for turn in value]
            return [{"role": role, "content": text} for pair in texts for role, text in pair]
    if not isinstance(value, str) or not value.startswith(BEGINNINGS):
        return value
    _, *parts = _MARK.split(value)
    roles = ["user" if mark == "Human" else "assistant" for mark in parts[::2]]
    if "assistant" not in roles:
        return value
    turns: list[Turn] = []
    for role, text in zip(roles, map(str.strip, parts[1::2]), strict=True):
        if turns and turns[-1]["role"] == role:  # HH-RLHF has consecutive turns of one speaker
            turns[-1]["content"] = f"{turns[-1]['content']}\n\n{text}".strip()
        else:
            turns.append({"role": role, "content": text})
    return turns[:-1] if is_prompt and not turns[-1]["content"] else turns


_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "function_call"), "assistant"),
    "system": "system",
    "developer": "developer",
    **dict.fromkeys(("observation", "function_response", "function", "tool"), "tool"),
}


def sharegpt_turn(turn: Any) -> Turn:
    """Converts a turn with `from` and `value` into one with `role` and `content`."""
    if isinstance(turn, Mapping) and turn.get("from") is None and turn.get("role") is not None:
        return {**turn}  # already a turn of `messages`
    if not isinstance(turn, Mapping) or "value" not in turn:
        raise ValueError("has a turn without from and value")
    sender = str(turn.get("from")).lower().replace("-", "_")
    if sender not in _ROLES:
        raise ValueError(
            f"has a turn from {turn.get('from')!r:.40}, not one of {', '.join(_ROLES)}"
        )
    others = {key: value for key, value in turn.items() if key not in ("from", "value")}
    if sender != "function_call":
        return {**others, "role": _ROLES[sender], "content": turn["value"]}
    calls = parsed(turn["value"], (dict, list))
    if isinstance(calls, str):
        raise ValueError(f"has text where JSON is expected: {calls[:60]!r}")
    calls = calls if isinstance(calls, list) else [calls]
    return {**others, "role": "assistant", "content": "", "tool_calls": calls}
