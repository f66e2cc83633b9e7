"""Anthropic's Messages."""

import json
from collections.abc import Iterator
from typing import Any

from nemo_rl_core.agents.calls import ChatResult, RefusedError
from nemo_rl_core.agents.chat_completions import Event
from nemo_rl_core.agents.fields import (
    AgentCall,
    Body,
    ReadTurns,
    call_of,
    mappings,
    options_of,
    reads_calls,
    refuse_format,
    text_of,
    tool_of,
)

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


class AnthropicMessages:
    """Reads calls and writes answers."""

    def read(self, body: Body) -> AgentCall:
        """Reads a call; raises `RefusedError` for a malformed or unsupported field."""
        config = body.get("output_config")
        refuse_format(config.get("format") if isinstance(config, dict) else None, "output_config")
        turns = ReadTurns()
        turns.add("system", text_of(body.get("system")))
        for message in mappings(body.get("messages"), "messages"):
            _add_message(turns, message)
        tools = []
        for tool in mappings(body.get("tools"), "tools"):
            if tool.get("type") not in (None, "custom"):
                raise RefusedError(f"tool {tool['type']!r:.40} is not supported", param="tools")
            tools.append(tool_of(tool, "input_schema"))
        choice = body.get("tool_choice")
        is_single = isinstance(choice, dict) and choice.get("disable_parallel_tool_use") is True
        options = options_of(
            {name: value for name, value in body.items() if name != "n"},
            max_tokens=("max_tokens",),
            stop="stop_sequences",
            reads_calls=reads_calls(choice),
            has_parallel_calls=not is_single,
        )
        return AgentCall(turns.turns, tools, options)

    def answer(self, body: Body, result: ChatResult, tokenizer: Any) -> dict[str, Any]:
        """Returns the answer to a call."""
        choice = result.choices[0]
        turn = choice.turn
        content: list[dict[str, Any]] = []
        if reasoning := turn.get("reasoning_content"):
            content.append({"type": "thinking", "thinking": reasoning, "signature": choice.id})
        calls = turn.get("tool_calls", ())
        if turn["content"] or not calls:
            content.append({"type": "text", "text": turn["content"]})
        for call in calls:
            function = call["function"]
            content.append(
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": function["name"],
                    "input": function["arguments"],
                }
            )
        reason = _STOP_REASONS[choice.finish_reason]
        is_stopped = choice.stop_string is not None and choice.finish_reason == "stop"
        return {
            "id": f"msg_{choice.id}",
            "type": "message",
            "role": "assistant",
            "model": body.get("model"),
            "content": content,
            "stop_reason": "stop_sequence" if is_stopped else reason,
            "stop_sequence": choice.stop_string if is_stopped else None,
            "usage": {"input_tokens": result.num_prompt_tokens, "output_tokens": result.num_tokens},
        }

    def events(self, body: Body, answer: dict[str, Any]) -> Iterator[Event]:
        """Yields the answer as events."""

        def event(kind: str, **fields: Any) -> Event:
            return kind, {"type": kind, **fields}

        usage = {**answer["usage"], "output_tokens": 0}
        ends = {"stop_reason": None, "stop_sequence": None}
        yield event("message_start", message={**answer, **ends, "content": [], "usage": usage})
        for index, block in enumerate(answer["content"]):
            if block["type"] == "tool_use":
                start = {**block, "input": {}}
                deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
            elif block["type"] == "thinking":
                start = {**block, "thinking": "", "signature": ""}
                deltas = [
                    {"type": "thinking_delta", "thinking": block["thinking"]},
                    {"type": "signature_delta", "signature": block["signature"]},
                ]
            else:
                start = {**block, "text": ""}
                deltas = [{"type": "text_delta", "text": block["text"]}]
            yield event("content_block_start", index=index, content_block=start)
            for delta in deltas:
                yield event("content_block_delta", index=index, delta=delta)
            yield event("content_block_stop", index=index)
        delta = {name: answer[name] for name in ends}
        yield event("message_delta", delta=delta, usage=answer["usage"])
        yield event("message_stop")

    def error(self, error: RefusedError) -> dict[str, Any]:
        """Returns the body of an error."""
        kind = "api_error" if error.status >= 500 else "invalid_request_error"
        detail = {"type": _ERRORS.get(error.status, kind), "message": str(error)}
        return {"type": "error", "error": detail}


def _add_message(turns: ReadTurns, message: Body) -> None:
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str):
        turns.add(role, content)
        return
    texts, reasonings, calls = [], [], []
    num_before = len(turns.turns)
    for block in mappings(content, "content"):
        kind = block.get("type")
        if kind == "tool_result":
            turns.add("tool", text_of(block.get("content")), tool_call_id=block.get("tool_use_id"))
        elif kind == "tool_use":
            calls.append(call_of(block.get("id"), block.get("name"), block.get("input")))
        elif kind == "thinking":
            reasonings.append(text_of(block.get("thinking")))
        elif kind != "redacted_thinking":
            texts.append(text_of([block]))
    if texts or calls or reasonings or len(turns.turns) == num_before:
        text, reasoning = "".join(texts), "".join(reasonings)
        turns.add(role, text, reasoning_content=reasoning, tool_calls=calls)
