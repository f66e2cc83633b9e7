"""Refusal of turns with content that a chat template does not write.

A conversation is rendered with and without the content. If both texts are equal, the model would
never see the content: a tool call, its result, or reasoning to learn.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from nemo_rl_core.data.control_tokens import REASONING, render_turns
from nemo_rl_core.data.tools import ToolsByTask
from nemo_rl_core.data.turns import FLAG, OTHER_CALLS, Turn
from nemo_rl_core.errors import DataError

_CHECKED = {"role", "content", "tool_calls", FLAG, *OTHER_CALLS, *REASONING}

START_OF_REASONING, END_OF_REASONING = "<think>", "</think>"

_REASONING_FIX = (
    "remove {key} from the row, or write it into the content in the model's format, such as "
    "<think>...</think>"
)

_TAG = re.compile(r"\s*(<\w+>)")

_CALLS = " with calls"

_PROBE = "\U0010fffb"


def refuse_unwritten(
    tokenizer: Any,
    turns: Sequence[Turn],
    *,
    trained: Sequence[int] = (),
    tools: Sequence[Mapping[str, Any]] = (),
    row: str,
) -> None:
    """Raises if the chat template does not write a turn's text, calls or reasoning, or the tools.

    Reasoning is checked only in trained turns, since templates omit that of earlier turns on
    purpose.
    """
    template = tokenizer.get_chat_template() if tokenizer.chat_template else None
    if tools and not writes_tools(tokenizer, template, turns[0]["role"]):
        raise DataError(
            f"{row} has tools that the chat template does not write, so they would not reach the "
            "model",
            got=str(tools)[:80],
            fix="use a chat template that writes tools, or data.drop_columns: [tools]",
        )
    if not tokenizer.chat_template:
        _refuse_keys_without_template(turns, row)
        return
    for index in trained:
        _refuse_lost_reasoning(tokenizer, turns[: index + 1], row)
    if not refuse_silent_turns(tokenizer, turns, row, trained=trained):
        return
    _refuse_doubled_tags(tokenizer, turns, row)
    for index, turn in enumerate(turns):
        for key in OTHER_CALLS:
            if turn.get(key) and not _writes(tokenizer, turns, index, [_without(turn, key)]):
                fix = f"write the calls as tool_calls, or remove {key} from the row"
                raise _unwritten(row, turn, key, fix)
        if turn.get("tool_calls") and not _writes(tokenizer, turns, index, _fewer_calls(turn)):
            fix = "remove the row, or write calls into the content in the model's format"
            raise _unwritten(row, turn, "tool_calls", fix)


def refuse_silent_turns(
    tokenizer: Any, turns: Sequence[Turn], row: str, *, trained: Sequence[int] = ()
) -> bool:
    """Raises if the chat template does not write a turn with these roles.

    Args:
        trained: Indices of turns that may be written only while no others follow (GPT-OSS's texts
            before calls).

    Returns:
        Whether turns have other keys or roles than those that every template writes.
    """
    roles = tuple(f"{turn['role']}{_CALLS if turn.get('tool_calls') else ''}" for turn in turns)
    alternating = tuple(("user", "assistant")[index % 2] for index in range(len(turns)))
    # Every template writes these.
    if roles == alternating and all(turn.keys() <= {"role", "content"} for turn in turns):
        return False
    template = tokenizer.get_chat_template()
    for index in _silent_turns(tokenizer, template, roles):
        last = roles[: index + 1] if index in trained else roles
        is_silent = index in _silent_turns(tokenizer, template, last)
        if is_silent and str(turns[index].get("content") or "").strip():
            raise _unwritten(row, turns[index], "text", "remove it from the row")
    return True


def written_tools(offered: ToolsByTask, tokenizer: Any) -> ToolsByTask:
    """Returns the offered tools; none if the chat template does not write tools."""
    template = tokenizer.get_chat_template() if tokenizer.chat_template else None
    return offered if any(offered.values()) and writes_tools(tokenizer, template, "user") else {}


@lru_cache(maxsize=16)
def writes_tools(tokenizer: Any, template: str | None, first: str) -> bool:
    """Whether the template writes the name of a tool in a conversation that starts with a role."""
    schema = {"name": _PROBE, "description": "", "parameters": {"type": "object", "properties": {}}}
    roles = dict.fromkeys([first, "user"])
    turns = [{"role": role, "content": "0"} for role in roles]
    tools = [{"type": "function", "function": schema}]
    return bool(template) and _PROBE in render_turns(
        tokenizer, turns, what="tools", tools=tools, add_generation_prompt=True
    )


def _refuse_doubled_tags(tokenizer: Any, turns: Sequence[Turn], row: str) -> None:
    """Refuses tool results in tags that the template also writes (`<tool_response>`)."""
    starts = (_TAG.match(turn["content"]) for turn in turns if turn["role"] == "tool")
    tags = {start[1] for start in starts if start}
    if not tags:
        return
    text = render_turns(tokenizer, turns, what=row, add_generation_prompt=False)
    for tag in sorted(tags):
        if re.search(rf"{re.escape(tag)}\s*{re.escape(tag)}", text):
            raise DataError(
                f"{row} has a tool turn in {tag}, which the chat template also writes",
                got=f"{tag} twice",
                fix=f"remove {tag} and its end tag from the turn",
            )


def _refuse_lost_reasoning(tokenizer: Any, turns: Sequence[Turn], row: str) -> None:
    """Refuses a last turn if its reasoning, in a key or in the content, is not written."""
    turn = turns[-1]
    lost = [
        (key, _REASONING_FIX.format(key=key))
        for key in REASONING
        if turn.get(key) and not _writes(tokenizer, turns, len(turns) - 1, [_without(turn, key)])
    ]
    *parts, answer = str(turn.get("content")).split(END_OF_REASONING)
    # One turn for each text of reasoning, with a probe instead of the text.
    others = [
        {**turn, "content": END_OF_REASONING.join([*parts[:n], _PROBE, *parts[n + 1 :], answer])}
        for n, part in enumerate(parts)
        if part.replace(START_OF_REASONING, "").strip()
    ]
    if others and not _writes(tokenizer, turns, len(turns) - 1, others):
        fix = f"remove the text before {END_OF_REASONING} from the row"
        lost.append((f"text before {END_OF_REASONING}", fix))
    if lost and not opens_reasoning(tokenizer, turns):
        raise _unwritten(row, turn, *lost[0])


def opens_reasoning(tokenizer: Any, turns: Sequence[Turn]) -> bool:
    """Whether the prompt of the last turn opens reasoning that the template does not write."""
    if len(turns) < 2:
        return False
    prompt = render_turns(tokenizer, turns[:-1], what="a prompt", add_generation_prompt=True)
    if not prompt.rstrip().endswith(START_OF_REASONING):
        return False
    text = render_turns(tokenizer, turns, what="a turn", add_generation_prompt=False)
    return not text.startswith(prompt)


def reasoning_of(turn: Turn) -> str:
    """Returns the reasoning of a turn, from its keys or from its content."""
    inline = str(turn.get("content")).rpartition(END_OF_REASONING)[0]
    keys = (str(turn[key]) for key in REASONING if turn.get(key))
    return next(keys, inline.rpartition(START_OF_REASONING)[2]).strip("\n")


def unwritten_keys(tokenizer: Any, turns: Sequence[Turn]) -> list[str]:
    """Returns keys of turns that do not change the rendered text, as `name of user turns`.

    Keys that `refuse_unwritten` checks are left out.
    """
    unwritten: dict[str, None] = {}
    for index, turn in enumerate(turns):
        for key in turn.keys() - _CHECKED:
            shortened = [_without(turn, key)]
            if not tokenizer.chat_template or not _writes(tokenizer, turns, index, shortened):
                unwritten[f"{key} of {turn['role']} turns"] = None
    return sorted(unwritten)


@lru_cache(maxsize=4096)
def _silent_turns(tokenizer: Any, template: str, roles: tuple[str, ...]) -> tuple[int, ...]:
    """Returns indices of turns of these roles that are not rendered; none if rendering fails."""
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    turns: list[Turn] = [
        {
            "role": role.removesuffix(_CALLS),
            "content": f"{_PROBE}{index}{_PROBE}",
            **({"tool_calls": calls} if role.endswith(_CALLS) else {}),
        }
        for index, role in enumerate(roles)
    ]
    try:
        text = render_turns(tokenizer, turns, what="roles", add_generation_prompt=False)
    except DataError:
        return ()
    return tuple(n for n, turn in enumerate(turns) if turn["content"] not in text)


def _without(turn: Turn, key: str) -> Turn:
    return {name: value for name, value in turn.items() if name != key}


def _fewer_calls(turn: Turn) -> Iterator[Turn]:
    """Yields the turn without its calls, without one call, and without one call's arguments."""
    calls = turn["tool_calls"]
    yield _without(turn, "tool_calls")
    for number, call in enumerate(calls):
        if len(calls) > 1:
            yield {**turn, "tool_calls": [*calls[:number], *calls[number + 1 :]]}
        function = call["function"] if isinstance(call, dict) and "function" in call else {}
        for key in [key for key, value in function.items() if value and key != "name"]:
            shortened = {**call, "function": {**function, key: {}}}
            yield {**turn, "tool_calls": [*calls[:number], shortened, *calls[number + 1 :]]}


def _writes(tokenizer: Any, turns: Sequence[Turn], index: int, others: Iterable[Turn]) -> bool:
    """Whether the text changes each time one of `others` replaces the turn at `index`."""

    def rendered(turn: Turn) -> str | None:
        changed = [*turns[:index], turn, *turns[index + 1 :]]
        try:
            return render_turns(tokenizer, changed, what="a turn", add_generation_prompt=False)
        except DataError:  # a template that fails without the content reads it
            return None

    text = rendered(turns[index])
    return text is None or all(rendered(other) != text for other in others)


def _refuse_keys_without_template(turns: Sequence[Turn], row: str) -> None:
    for turn in turns:
        for key in ("tool_calls", *OTHER_CALLS, *REASONING):
            if turn.get(key):
                fix = "use the tokenizer of a chat model, or set its chat_template"
                raise _unwritten(row, turn, key, fix)


def _unwritten(row: str, turn: Turn, what: str, fix: str) -> DataError:
    return DataError(
        f"{row} has {what} in a turn of {turn['role']!r} that the chat template does not write, so "
        "it would not reach the model",
        got=str(turn.get(what, turn.get("content")))[:80],
        fix=f"use a chat template that writes it, or {fix}",
    )
