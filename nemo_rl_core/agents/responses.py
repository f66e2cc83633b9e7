"""OpenAI's Responses."""

import time
from collections.abc import Iterator
from itertools import count
from typing import Any

from nemo_rl_core.agents.calls import ChatResult, RefusedError
from nemo_rl_core.agents.chat_completions import ChatCompletions, Event, logprobs_of
from nemo_rl_core.agents.fields import (
    AgentCall,
    Body,
    ReadTurns,
    arguments_text,
    call_of,
    mappings,
    options_of,
    reads_calls,
    refuse_format,
    text_of,
    tool_of,
)

_LOGPROBS = "message.output_text.logprobs"


class Responses(ChatCompletions):
    """Reads calls and writes answers."""

    def read(self, body: Body) -> AgentCall:
        """Reads a call; raises `RefusedError` for a malformed or unsupported field."""
        text = body.get("text")
        refuse_format(text.get("format") if isinstance(text, dict) else None, "text.format")
        turns = ReadTurns()
        turns.add("system", text_of(body.get("instructions")))
        items = body.get("input")
        if isinstance(items, str):
            turns.add("user", items)
        else:
            for item in mappings(items, "input"):
                _add_item(turns, item)
        tools = []
        for tool in mappings(body.get("tools"), "tools"):
            if tool.get("type") != "function":
                raise RefusedError(f"tool {tool.get('type')!r:.40} is not supported", param="tools")
            tools.append(tool_of(tool, "parameters"))
        previous = body.get("previous_response_id")
        options = options_of(
            {name: value for name, value in body.items() if name != "n"},
            max_tokens=("max_output_tokens",),
            stop="stop",
            reads_calls=reads_calls(body.get("tool_choice")),
            has_parallel_calls=body.get("parallel_tool_calls") is not False,
            previous=None if previous is None else str(previous),
        )
        return AgentCall(turns.turns, tools, options)

    def answer(self, body: Body, result: ChatResult, tokenizer: Any) -> dict[str, Any]:
        """Returns the answer to a call."""
        choice = result.choices[0]
        is_cut = choice.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        turn = choice.turn
        output: list[dict[str, Any]] = []
        if reasoning := turn.get("reasoning_content"):
            content = [{"type": "reasoning_text", "text": reasoning}]
            output.append(
                {"type": "reasoning", "id": f"rs_{choice.id}", "summary": [], "content": content}
            )
        calls = turn.get("tool_calls", ())
        if turn["content"] or not calls:
            logprobs = logprobs_of(choice, tokenizer)["content"] if _wants_logprobs(body) else []
            part = {
                "type": "output_text",
                "text": turn["content"],
                "annotations": [],
                "logprobs": logprobs,
            }
            message = {"type": "message", "id": f"msg_{choice.id}", "role": "assistant"}
            output.append({**message, "status": status, "content": [part]})
        for number, call in enumerate(calls):
            output.append(
                {
                    "type": "function_call",
                    "id": f"fc_{choice.id}_{number}",
                    "call_id": call["id"],
                    "name": call["function"]["name"],
                    "arguments": arguments_text(call),
                    "status": status,
                }
            )
        return {
            "id": f"resp_{choice.id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata") or {},
            "model": body.get("model"),
            "output": output,
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": body.get("previous_response_id"),
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "usage": {
                "input_tokens": result.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": result.num_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": result.num_prompt_tokens + result.num_tokens,
            },
        }

    def events(self, body: Body, answer: dict[str, Any]) -> Iterator[Event]:
        """Yields the answer as events."""
        numbers = count()

        def event(kind: str, **fields: Any) -> Event:
            name = f"response.{kind}"
            return name, {"type": name, "sequence_number": next(numbers), **fields}

        begun = {**answer, "status": "in_progress", "output": [], "usage": None}
        yield event("created", response={**begun, "incomplete_details": None})
        for index, item in enumerate(answer["output"]):
            ids = {"output_index": index, "item_id": item["id"]}
            is_call = item["type"] == "function_call"
            started = {**item, **({"arguments": ""} if is_call else {"content": []})}
            if "status" in item:
                started["status"] = "in_progress"
            yield event("output_item.added", output_index=index, item=started)
            if is_call:
                text = item["arguments"]
                yield event("function_call_arguments.delta", **ids, delta=text)
                done = {"name": item["name"], "arguments": text}
                yield event("function_call_arguments.done", **ids, **done)
            else:
                part = item["content"][0]
                text, kind, ids = part["text"], part["type"], {**ids, "content_index": 0}
                logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
                yield event("content_part.added", **ids, part={**part, "text": ""})
                yield event(f"{kind}.delta", **ids, delta=text, **logprobs)
                yield event(f"{kind}.done", **ids, text=text, **logprobs)
                yield event("content_part.done", **ids, part=part)
            yield event("output_item.done", output_index=index, item=item)
        yield event(answer["status"], response=answer)


def _wants_logprobs(body: Body) -> bool:
    include = body.get("include")
    return isinstance(include, list) and _LOGPROBS in include


def _add_item(turns: ReadTurns, item: Body) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        role, content = item.get("role"), text_of(item.get("content"))
        last = turns.turns[-1] if turns.turns else {}
        if role == "assistant" and last.keys() == {"role", "content", "reasoning_content"}:
            last["content"] += content
        else:
            turns.add(role, content)
    elif kind == "reasoning":
        text = text_of(item.get("content")) or text_of(item.get("summary"))
        turns.add("assistant", "", reasoning_content=text)
    elif kind == "function_call":
        call = call_of(item.get("call_id"), item.get("name"), item.get("arguments"))
        turns.assistant().setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        turns.add("tool", text_of(item.get("output")), tool_call_id=item.get("call_id"))
    else:
        raise RefusedError(f"input of type {kind!r:.40} is not supported", param="input")
