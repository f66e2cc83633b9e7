"""Fields of a call's JSON body, checked as they are read."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nemo_rl_core.agents.calls import CallOptions, RefusedError
from nemo_rl_core.data.json_values import parsed
from nemo_rl_core.data.turns import Turn

Body = Mapping[str, Any]

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "logit_bias"),
)
_REFUSED = (
    *("functions", "function_call", "audio", "prompt", "structured_outputs", "guided_json"),
    *("guided_regex", "guided_choice", "guided_grammar", "bad_words", "min_tokens", "ignore_eos"),
    *("stop_token_ids", "continue_final_message", "echo", "chat_template", "chat_template_kwargs"),
    *("conversation", "background", "mcp_servers", "container", "top_logprobs", "output_format"),
)
"""Fields that would change the answer, and that this endpoint does not support."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
_MAX_CHOICES = 128
_MAX_STOPS = 16
_MAX_ITEMS = 10_000


@dataclass(frozen=True, slots=True)
class AgentCall:
    """A call, read from a dialect."""

    turns: list[Turn]
    tools: list[dict[str, Any]]
    options: CallOptions

    def named(self, idempotency_key: str | None, *, is_retry: bool) -> "AgentCall":
        """Returns the call with what the client's headers tell of repetitions."""
        options = replace(self.options, idempotency_key=idempotency_key, is_retry=is_retry)
        return replace(self, options=options)


@dataclass
class ReadTurns:
    """Turns of a conversation as they are read.

    Example:
        >>> turns = ReadTurns()
        >>> turns.add("system", "")
        >>> turns.add("user", "2+2")
        >>> turns.turns
        [{'role': 'user', 'content': '2+2'}]
    """

    turns: list[Turn] = field(default_factory=list)

    def add(self, role: Any, content: str, **others: Any) -> None:
        """Appends a turn; values of `others` other than texts and lists are left out."""
        if role not in _ROLES:
            raise RefusedError(
                f"a message has the role {role!r:.40}, not one of {', '.join(_ROLES)}"
            )
        if role in ("system", "developer") and not (self.turns or content.strip()):
            return
        kept = {
            name: value for name, value in others.items() if value and isinstance(value, str | list)
        }
        self.turns.append({"role": role, "content": content, **kept})

    def assistant(self) -> Turn:
        """Returns the last turn if it is the assistant's, else a new one."""
        if not self.turns or self.turns[-1]["role"] != "assistant":
            self.add("assistant", "")
        return self.turns[-1]


def options_of(body: Body, *, max_tokens: Sequence[str], stop: str, **others: Any) -> CallOptions:
    """Returns the options that dialects share.

    Args:
        max_tokens: Names of the maximum number of new tokens.
        stop: Name of the stop strings.
        others: Other fields of `CallOptions`.
    """
    for name in _REFUSED:
        if body.get(name) not in (None, False, 0, "", [], {}):
            raise RefusedError(f"{name} is not supported: leave it out", param=name)
    limits = [limit for name in max_tokens if (limit := positive(body, name)) is not None]
    stops = body.get(stop) or []
    stops = [stops] if isinstance(stops, str) else stops
    are_texts = isinstance(stops, list) and all(isinstance(each, str) and each for each in stops)
    if not are_texts or len(stops) > _MAX_STOPS:
        raise RefusedError(f"{stop} must be a text or up to {_MAX_STOPS} texts", param=stop)
    for name in _SAMPLING[:-1]:
        if not isinstance(body.get(name), int | float | None):
            raise RefusedError(f"{name} must be a number", param=name)
    return CallOptions(
        num_choices=positive(body, "n", most=_MAX_CHOICES) or 1,
        max_new_tokens=min(limits, default=None),
        stop_strings=tuple(stops),
        sampling={name: body.get(name) for name in _SAMPLING},
        **others,
    )


def positive(body: Body, name: str, *, most: int | None = None) -> int | None:
    """Returns a positive integer, or None if there is no value."""
    value = body.get(name)
    is_positive = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if value is not None and not (is_positive and (most is None or value <= most)):
        limit = "" if most is None else f" of at most {most}"
        raise RefusedError(f"{name} must be a positive integer{limit}", param=name)
    return value


def mappings(value: Any, name: str) -> list[Body]:
    """Returns a list of JSON objects; no value is an empty list."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise RefusedError(f"{name} must be a list of objects", param=name)
    if len(value) > _MAX_ITEMS:
        raise RefusedError(f"{name} has more than {_MAX_ITEMS} items", param=name)
    return value


def name_of(value: Any, name: str) -> str:
    """Returns a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise RefusedError(f"{name} must be a text", param=name)
    return value


def text_of(content: Any) -> str:
    """Returns the text of a content: a text, text parts or nothing."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in mappings(content, "content"):
        kind = part.get("type")
        text = part.get("refusal" if kind == "refusal" else "text")
        if kind not in (*_TEXT_PARTS, "refusal") or not isinstance(text, str):
            raise RefusedError(f"content of type {kind!r:.40} is not supported: send text")
        texts.append(text)
    return "".join(texts)


def call_of(id_: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """Returns a tool call of a turn; other arguments than JSON objects stay text."""
    function = {"name": name_of(name, "name"), "arguments": parsed(arguments or "{}", dict)}
    return {"id": str(id_ or ""), "type": "function", "function": function}


def arguments_text(call: Mapping[str, Any]) -> str:
    """Returns the arguments of a turn's call as JSON text."""
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def tool_of(tool: Body, parameters: str) -> dict[str, Any]:
    """Returns the schema of a function as templates read it.

    Args:
        parameters: Name of the field with the JSON schema of the arguments.
    """
    schema = tool.get(parameters)
    if not isinstance(schema, dict | None):
        raise RefusedError(f"{parameters} of a tool must be a JSON schema", param="tools")
    function: dict[str, Any] = {"name": name_of(tool.get("name"), "name of a tool")}
    if tool.get("description"):
        function["description"] = name_of(tool["description"], "description of a tool")
    function["parameters"] = schema or {}
    if isinstance(tool.get("return"), dict):  # in the schemas of transformers
        function["return"] = tool["return"]
    return {"type": "function", "function": function}


def reads_calls(choice: Any) -> bool:
    """Whether `tool_choice` permits calls; raises `RefusedError` if it requires one."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind not in (None, "auto", "none"):
        raise RefusedError(
            f"tool_choice {kind!r:.40} is not supported, since tokens that are forced are not the "
            "policy's: use 'auto' or 'none'",
            param="tool_choice",
        )
    return kind != "none"


def refuse_format(value: Any, name: str) -> None:
    """Refuses formats of the answer other than text."""
    kind = value.get("type") if isinstance(value, dict) else value
    if kind not in (None, "text"):
        raise RefusedError(
            f"{name} {kind!r:.40} is not supported, since tokens that are forced are not the "
            "policy's: leave it out",
            param=name,
        )
