"""OpenAI's Chat Completions."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from nemo_rl_core.agents.calls import ChatResult, RefusedError, SampledChoice
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

Event = tuple[str | None, dict[str, Any] | str]
"""Name and data of a server-sent event."""


class ChatCompletions:
    """Reads calls and writes answers."""

    def read(self, body: Body) -> AgentCall:
        """Reads a call; raises `RefusedError` for a malformed or unsupported field."""
        refuse_format(body.get("response_format"), "response_format")
        turns = ReadTurns()
        for message in mappings(body.get("messages"), "messages"):
            role = message.get("role")
            calls = []
            for call in mappings(message.get("tool_calls"), "tool_calls"):
                function = call.get("function")
                if not isinstance(function, dict):
                    raise RefusedError("a tool call has no function", param="messages")
                calls.append(
                    call_of(call.get("id"), function.get("name"), function.get("arguments"))
                )
            reasoning = message.get("reasoning_content") or message.get("reasoning")
            turns.add(
                "tool" if role == "function" else role,
                text_of(message.get("content")),
                reasoning_content=text_of(reasoning),
                tool_calls=calls,
                tool_call_id=message.get("tool_call_id"),
                name=message.get("name"),
            )
        tools = []
        for tool in mappings(body.get("tools"), "tools"):
            if not isinstance(tool.get("function"), dict):
                raise RefusedError(f"a tool has the type {tool.get('type')!r:.40}, not 'function'")
            tools.append(tool_of(tool["function"], "parameters"))
        options = options_of(
            body,
            max_tokens=("max_completion_tokens", "max_tokens"),
            stop="stop",
            reads_calls=reads_calls(body.get("tool_choice")),
            has_parallel_calls=body.get("parallel_tool_calls") is not False,
        )
        return AgentCall(turns.turns, tools, options)

    def answer(self, body: Body, result: ChatResult, tokenizer: Any) -> dict[str, Any]:
        """Returns the answer to a call."""
        wants_logprobs = bool(body.get("logprobs"))
        return {
            "id": f"chatcmpl-{result.choices[0].id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.get("model"),
            "choices": [
                {
                    "index": index,
                    "message": _message(choice),
                    "finish_reason": choice.finish_reason,
                    "logprobs": logprobs_of(choice, tokenizer) if wants_logprobs else None,
                }
                for index, choice in enumerate(result.choices)
            ],
            "usage": {
                "prompt_tokens": result.num_prompt_tokens,
                "completion_tokens": result.num_tokens,
                "total_tokens": result.num_prompt_tokens + result.num_tokens,
            },
        }

    def events(self, body: Body, answer: dict[str, Any]) -> Iterator[Event]:
        """Yields the answer as chunks."""
        usage = answer["usage"]
        shared = {**answer, "object": "chat.completion.chunk", "usage": None}
        for choice in answer["choices"]:
            delta = dict(choice["message"])
            calls = delta.pop("tool_calls", ())
            if calls:
                delta["tool_calls"] = [{"index": index, **each} for index, each in enumerate(calls)]
            first = {**choice, "delta": delta, "finish_reason": None}
            last = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
            del first["message"]
            yield None, {**shared, "choices": [first]}
            yield None, {**shared, "choices": [last]}
        options = body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            yield None, {**shared, "choices": [], "usage": usage}
        yield None, "[DONE]"

    def error(self, error: RefusedError) -> dict[str, Any]:
        """Returns the body of an error."""
        kinds = {401: "authentication_error", 500: "server_error"}
        return {
            "error": {
                "message": str(error),
                "type": kinds.get(error.status, "invalid_request_error"),
                "param": error.param,
                "code": error.code,
            }
        }


def logprobs_of(choice: SampledChoice, tokenizer: Any) -> dict[str, Any]:
    """Returns the logprobs of all tokens of a choice, including special tokens."""
    if np.isnan(choice.logprobs).any():
        raise RefusedError("the engine returns no logprobs", param="logprobs")
    texts = [tokenizer.decode([each]) for each in choice.token_ids.tolist()]
    content = [
        {"token": text, "logprob": logprob, "bytes": [*text.encode()], "top_logprobs": []}
        for text, logprob in zip(texts, choice.logprobs.tolist(), strict=True)
    ]
    return {"content": content, "refusal": None}


def _message(choice: SampledChoice) -> dict[str, Any]:
    turn = choice.turn
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["function"]["name"], "arguments": arguments_text(call)},
        }
        for call in turn.get("tool_calls", ())
    ]
    reasoning = turn.get("reasoning_content")
    return {
        "role": "assistant",
        "content": None if calls and not turn["content"] else turn["content"],
        "refusal": None,
        **({"reasoning_content": reasoning} if reasoning else {}),
        **({"tool_calls": calls} if calls else {}),
    }
