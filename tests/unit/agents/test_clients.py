"""The clients of OpenAI and Anthropic call the endpoint as they call their own services."""

import asyncio
import json
from typing import Any

import anthropic
import httpx
import openai
import pytest

from nemo_rl_core.rollouts.episode import Bounds
from tests.unit.agents.conftest import ADD, CALL, RecordedEngine, session_of

HI = {"role": "user", "content": "Hi"}
TOOL = {"role": "tool", "content": "2.0"}
CLAUDE_ADD = {"name": "add", "input_schema": ADD["function"]["parameters"]}
FLAT_ADD = {"type": "function", "strict": False, **ADD["function"]}


@pytest.fixture
def calling(chat_tokenizer):
    """An engine that calls the tool, and then answers."""

    def text(request):
        return CALL if request.before is None else "It is 2."

    return RecordedEngine(chat_tokenizer, text)


def openai_client(url: str, key: str, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key=key, **options)


def is_linear(engine: RecordedEngine) -> bool:
    (prompt, new), (second, _) = engine.completions
    return second[: len(prompt) + len(new)] == prompt + new


def test_chat_completions_with_a_tool(calling, served):
    session = session_of(calling)

    async def agent(server, url):
        client = openai_client(url, server.open(session))
        messages: list[Any] = [HI]
        options: dict[str, Any] = {"model": "gpt", "messages": messages, "tools": [ADD]}
        first = await client.chat.completions.create(**options, logprobs=True)
        (choice,) = first.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Wait.")
        (call,) = choice.message.tool_calls
        assert call.function.name == "add"
        assert json.loads(call.function.arguments) == {"a": 1.0, "b": "x"}
        tokens = choice.logprobs.content
        assert len(tokens) == first.usage.completion_tokens
        assert b"".join(bytes(token.bytes) for token in tokens).decode() == f"{CALL}<|im_end|>"
        assert all(token.logprob < 0 for token in tokens)
        messages += [choice.message, {**TOOL, "tool_call_id": call.id}]
        second = await client.chat.completions.create(**options)
        assert second.choices[0].message.content == "It is 2."
        assert second.usage.prompt_tokens == len(calling.completions[1][0])

    served(agent)
    assert is_linear(calling)
    (sample,) = session.samples()
    assert [turn["role"] for turn in sample.turns] == ["user", "assistant", "tool", "assistant"]


def test_chat_completions_as_a_stream(calling, served):
    session = session_of(calling)

    async def agent(server, url):
        client = openai_client(url, server.open(session))
        options: dict[str, Any] = {"stream_options": {"include_usage": True}, "tools": [ADD]}
        messages: list[Any] = [HI]
        async with client.chat.completions.stream(
            model="gpt", messages=messages, **options
        ) as stream:
            kinds = [event.type async for event in stream]
            answer = await stream.get_final_completion()
        assert "content.delta" in kinds
        assert "tool_calls.function.arguments.done" in kinds
        (choice,) = answer.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Wait.")
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"a": 1.0, "b": "x"}
        assert answer.usage.completion_tokens == len(calling.completions[0][1])
        messages += [choice.message.model_dump(), {**TOOL, "tool_call_id": "other"}]
        chunks = await client.chat.completions.create(
            model="gpt", messages=messages, stream=True, tools=[ADD]
        )
        parts = [chunk.choices[0].delta.content or "" async for chunk in chunks]
        assert "".join(parts) == "It is 2."

    served(agent)
    assert is_linear(calling)


def test_responses_with_a_tool(calling, served):
    session = session_of(calling)

    async def agent(server, url):
        client = openai_client(url, server.open(session))
        options: dict[str, Any] = {"model": "gpt", "tools": [FLAT_ADD], "instructions": "Add."}
        first = await client.responses.create(
            **options, input="Hi", include=["message.output_text.logprobs"]
        )
        message, call = first.output
        assert message.content[0].text == "Wait."
        assert len(message.content[0].logprobs) == first.usage.output_tokens
        assert json.loads(call.arguments) == {"a": 1.0, "b": "x"}
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "2.0"}
        history: list[Any] = [HI, *(item.model_dump() for item in first.output), output]
        second = await client.responses.create(**options, input=history)
        assert second.output_text == "It is 2."
        # The same conversation by the id of its last response is the same context.
        third = await client.responses.create(
            **options, input=[output], previous_response_id=first.id
        )
        assert third.usage.input_tokens == second.usage.input_tokens
        with pytest.raises(openai.NotFoundError, match="no response 'resp_x'"):
            await client.responses.create(**options, input="Hi", previous_response_id="resp_x")

    served(agent)
    assert calling.completions[1][0] == calling.completions[2][0]
    assert len(session.samples()) == 2


def test_responses_as_a_stream(calling, served):
    session = session_of(calling)

    async def agent(server, url):
        client = openai_client(url, server.open(session))
        async with client.responses.stream(model="gpt", input="Hi", tools=[FLAT_ADD]) as stream:
            events = [event async for event in stream]
            answer = await stream.get_final_response()
        kinds = [event.type for event in events]
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        numbers = [event.sequence_number for event in events]
        assert numbers == sorted(set(numbers))
        assert [item.type for item in answer.output] == ["message", "function_call"]
        assert answer.output_text == "Wait."

    served(agent)


def test_anthropic_messages_with_a_tool(calling, served):
    session = session_of(calling)

    async def agent(server, url):
        client = anthropic.AsyncAnthropic(base_url=url, api_key=server.open(session))
        messages: list[Any] = [HI]
        options: dict[str, Any] = {"model": "claude", "max_tokens": 500, "tools": [CLAUDE_ADD]}
        first = await client.messages.create(**options, messages=messages, system="Add.")
        text, call = first.content
        assert (text.text, call.name, call.input) == ("Wait.", "add", {"a": 1.0, "b": "x"})
        assert first.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "2.0"}
        messages += [
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [{**result, "cache_control": {"type": "ephemeral"}}]},
        ]
        system = [{"type": "text", "text": "Add."}]
        count = await client.messages.count_tokens(
            model="claude", messages=messages, system=system, tools=[CLAUDE_ADD]
        )
        async with client.messages.stream(**options, messages=messages, system=system) as stream:
            texts = [text async for text in stream.text_stream]
            second = await stream.get_final_message()
        assert ["".join(texts), second.content[0].text] == ["It is 2."] * 2
        assert second.stop_reason == "end_turn"
        assert second.usage.input_tokens == count.input_tokens
        assert second.usage.output_tokens == len(calling.completions[1][1])

    served(agent)
    assert is_linear(calling)


def test_anthropic_streams_tool_calls_and_stop_sequences(calling, served):
    session = session_of(calling)

    async def agent(server, url):
        client = anthropic.AsyncAnthropic(base_url=url, api_key=server.open(session))
        options: dict[str, Any] = {"model": "claude", "messages": [HI], "max_tokens": 500}
        async with client.messages.stream(**options, tools=[CLAUDE_ADD]) as stream:
            message = await stream.get_final_message()
        assert message.content[1].input == {"a": 1.0, "b": "x"}
        stopped = await client.messages.create(**options, stop_sequences=["</tool_call>"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "</tool_call>")

    served(agent)


def test_several_choices_are_different_draws(engine, served):
    session = session_of(engine)

    async def agent(server, url):
        client = openai_client(url, server.open(session))
        answer = await client.chat.completions.create(model="gpt", messages=[HI], n=3)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage.completion_tokens == sum(len(new) for _, new in engine.completions)
        chunks = await client.chat.completions.create(model="g", messages=[HI], n=2, stream=True)
        assert {chunk.choices[0].index async for chunk in chunks} == {0, 1}

    served(agent)
    assert len(session.samples()) == 5


def test_a_retry_after_a_time_out_gets_the_first_answer(engine, served):
    session = session_of(engine)

    async def agent(server, url):
        client = openai_client(url, server.open(session), timeout=0.3, max_retries=4)
        engine.delay.clear()
        call = asyncio.create_task(client.chat.completions.create(model="gpt", messages=[HI]))
        await asyncio.sleep(1.2)  # the client has given up and called again
        engine.delay.set()
        answer = await call
        assert answer.choices[0].message.content.startswith("The answer is")

    served(agent)
    assert len(engine.requests) == 1
    assert session.num_unanswered == 0


def test_length_ends_a_turn(engine, served):
    session = session_of(engine)

    async def agent(server, url):
        key = server.open(session)
        client = openai_client(url, key)
        options: dict[str, Any] = {"model": "gpt", "messages": [HI], "stop": "never"}
        answer = await client.chat.completions.create(**options, max_completion_tokens=3)
        assert answer.choices[0].finish_reason == "length"
        response = await client.responses.create(model="gpt", input="Hi", max_output_tokens=2)
        assert response.incomplete_details.reason == "max_output_tokens"
        claude = anthropic.AsyncAnthropic(base_url=url, api_key=key)
        message = await claude.messages.create(model="c", messages=[HI], max_tokens=1)
        assert message.stop_reason == "max_tokens"

    served(agent)
    assert [len(new) for _, new in engine.completions] == [3, 2, 1]
    assert all(sample.truncated for sample in session.samples())


def test_the_end_of_the_context_is_an_error_of_the_dialect(engine, served):
    session = session_of(engine, bounds=Bounds(max_turns=1, max_tokens=100, max_new_tokens=50))

    async def agent(server, url):
        key = server.open(session)
        client, claude = (
            openai_client(url, key),
            anthropic.AsyncAnthropic(base_url=url, api_key=key),
        )
        answer = await client.chat.completions.create(model="gpt", messages=[HI])
        messages: Any = [HI, answer.choices[0].message.model_dump(), HI]
        with pytest.raises(openai.BadRequestError) as error:
            await client.chat.completions.create(model="gpt", messages=messages)
        assert error.value.code == "context_length_exceeded"
        messages = [{"role": each["role"], "content": each["content"]} for each in messages]
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await claude.messages.create(model="c", messages=messages, max_tokens=5)

    served(agent)
    assert session.samples()[0].truncated


REFUSED = [
    ({"temperature": 0.2}, "temperature is 0.2, but this run samples and trains at 1.0"),
    ({"top_logprobs": 2, "logprobs": True}, "top_logprobs is not supported"),
    ({"tool_choice": "required", "tools": [ADD]}, "tool_choice 'required' is not supported"),
    (
        {"response_format": {"type": "json_object"}},
        "response_format 'json_object' is not supported",
    ),
    ({"n": 0}, "n must be a positive integer"),
    ({"stop": [""]}, "stop must be a text"),
    ({"extra_body": {"chat_template": "x"}}, "chat_template is not supported"),
    ({"messages": [{"role": "king", "content": ""}]}, "the role 'king'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url' is not"),
    ({"messages": [{**HI, "content": "\ud800"}]}, "half of a surrogate pair"),
]


@pytest.mark.parametrize(("fields", "text"), REFUSED)
def test_what_would_change_tokens_is_refused_by_name(engine, served, fields, text):
    session = session_of(engine)

    async def agent(server, url):
        body = {"model": "gpt", "messages": [HI], **fields, **fields.get("extra_body", {})}
        headers = {"authorization": f"Bearer {server.open(session)}"}
        async with httpx.AsyncClient() as client:
            # ASCII, since httpx does not encode half of a surrogate pair.
            answer = await client.post(
                f"{url}/chat/completions", content=json.dumps(body), headers=headers
            )
        assert answer.status_code == 400
        assert text in answer.json()["error"]["message"]

    served(agent)
    assert not engine.requests


def test_unknown_fields_and_seeds_are_ignored(engine, served):
    session = session_of(engine)

    async def agent(server, url):
        client = openai_client(url, server.open(session))
        options: dict[str, Any] = {"model": "gpt", "messages": [HI], "extra_body": {"new": 1}}
        answers = [
            await client.chat.completions.create(**options, seed=3, user="me") for _ in range(2)
        ]
        assert len({answer.id for answer in answers}) == 2
        assert [model.id async for model in await client.models.list()] == ["policy"]

    served(agent)
    assert len({each.seed for each in engine.requests}) == 2


def test_keys_open_only_their_session_until_its_end(engine, served):
    first, second = session_of(engine, 0), session_of(engine, 1)

    async def agent(server, url):
        keys = [server.open(first), server.open(second)]
        number, code = keys[0].rsplit(".", 1)
        swapped = f"{number}.{keys[1].rsplit('.', 1)[1]}"
        for key in ("", "x", swapped, f"{number}.{code[:-1]}0" if code[-1] != "0" else "x"):
            with pytest.raises(openai.AuthenticationError):
                await openai_client(url, key or "none").chat.completions.create(
                    model="gpt", messages=[HI]
                )
        server.end(keys[0])
        with pytest.raises(openai.APIStatusError, match="the episode has ended") as error:
            await openai_client(url, keys[0]).chat.completions.create(model="gpt", messages=[HI])
        assert error.value.status_code == 410
        claude = anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=keys[1])
        await claude.messages.create(model="c", messages=[HI], max_tokens=500)

    served(agent)
    assert len(engine.requests) == 1
    assert first.samples() == []
    assert len(second.samples()) == 1
