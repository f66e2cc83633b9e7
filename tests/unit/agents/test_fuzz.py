"""Histories that clients rewrite in every way continue sampled tokens and never those of others."""

import asyncio
import copy
import json
import random
from collections import Counter
from typing import Any

import openai
import pytest

from tests.unit.agents.conftest import ADD, CALL, RecordedEngine, session_of

NUM_SESSIONS = 8
History = list[dict[str, Any]]


def respelled(turn: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """An equal turn as another client might send it."""
    turn = copy.deepcopy(turn)
    if turn["role"] == "system" and draw.random() < 0.3:
        turn["role"] = "developer"
    if turn["content"]:
        if draw.random() < 0.3:
            turn["content"] = (
                draw.choice(["", " ", "\n\n"]) + turn["content"] + draw.choice([" ", "\n"])
            )
        if draw.random() < 0.2:
            middle = draw.randrange(len(turn["content"]))
            parts = turn["content"][:middle], turn["content"][middle:]
            turn["content"] = [{"type": "text", "text": part} for part in parts]
    elif draw.random() < 0.5:
        turn["content"] = draw.choice([None, ""])
    for call in turn.get("tool_calls") or ():
        arguments = json.loads(call["function"]["arguments"])
        items = list(arguments.items())
        draw.shuffle(items)
        as_javascript = {key: int(value) if value == 1.0 else value for key, value in items}
        call["function"]["arguments"] = json.dumps(as_javascript, indent=draw.choice([None, 2]))
        if draw.random() < 0.5:
            call["id"] = f"call_{draw.random()}"
    extra = draw.choice(["refusal", "annotations", "audio", None])
    if extra:
        turn[extra] = None
    keys = list(turn)
    draw.shuffle(keys)
    return {key: turn[key] for key in keys}


def rewritten(history: History, draw: random.Random) -> History:
    """Another conversation: shorter, in another order, or with another turn."""
    history = copy.deepcopy(history)
    kind = draw.choice(["cut", "order", "edit", "roles"])
    index = draw.randrange(len(history))
    if kind == "cut":
        return history[: index + 1]
    if kind == "order":
        other = draw.randrange(len(history))
        history[index], history[other] = history[other], history[index]
    elif kind == "edit":
        history[index]["content"] = f"Edited {draw.random()}"
        history[index].pop("tool_calls", None)
    else:
        history[index] = {"role": draw.choice(["user", "assistant"]), "content": "Other role"}
    return history


def call_in(dialect: str, turns: History) -> tuple[str, dict[str, Any]]:
    """Returns the path and the body of a call with these turns."""
    body: dict[str, Any] = {"model": "any", "messages": turns, "tools": [ADD]}
    if dialect == "responses":
        tool = {"type": "function", **ADD["function"]}
        items = [item for turn in turns for item in items_of(turn)]
        body = {"model": "any", "input": items, "tools": [tool]}
    elif dialect == "messages":
        tool = {key: ADD["function"][key] for key in ("description", "name")}
        tool["input_schema"] = ADD["function"]["parameters"]
        messages = [message_of(turn) for turn in turns]
        body = {"model": "any", "max_tokens": 1000, "messages": messages, "tools": [tool]}
    return f"/{dialect}", body


def items_of(turn: dict[str, Any]) -> History:
    """Returns a turn as items of Responses."""
    if turn["role"] == "tool":
        call_id, output = turn["tool_call_id"], turn["content"]
        return [{"type": "function_call_output", "call_id": call_id, "output": output}]
    calls = [
        {"type": "function_call", "call_id": each["id"], **each["function"]}
        for each in turn.get("tool_calls") or ()
    ]
    if turn["content"] or not calls:
        return [{"role": turn["role"], "content": turn["content"]}, *calls]
    return calls


def message_of(turn: dict[str, Any]) -> dict[str, Any]:
    """Returns a turn as a message of Anthropic."""
    content = turn["content"]
    if turn["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": turn["tool_call_id"], "content": content}
        return {"role": "user", "content": [result]}
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    for each in turn.get("tool_calls") or ():
        arguments = json.loads(each["function"]["arguments"])
        use = {"type": "tool_use", "id": each["id"], "name": each["function"]["name"]}
        blocks = [*blocks, {**use, "input": arguments}]
    return {"role": turn["role"], "content": blocks}


def turn_in(dialect: str, answer: Any) -> dict[str, Any]:
    """Returns the policy's turn in an answer."""
    if dialect == "chat/completions":
        message = answer["choices"][0]["message"]
        return {key: value for key, value in message.items() if value is not None}
    parts = answer["output"] if dialect == "responses" else answer["content"]
    text = "".join(
        part["text"] if dialect == "messages" else part["content"][0]["text"]
        for part in parts
        if part["type"] in ("text", "message")
    )
    calls = [
        {
            "id": part.get("call_id", part["id"]),
            "type": "function",
            "function": {
                "name": part["name"],
                "arguments": part["arguments"]
                if "arguments" in part
                else json.dumps(part["input"]),
            },
        }
        for part in parts
        if part["type"] in ("function_call", "tool_use")
    ]
    turn = {"role": "assistant", "content": text}
    return {**turn, "tool_calls": calls} if calls else turn


async def fuzz(
    num_calls: int, tokenizer: Any, server: Any, url: str, *, seed: int = 0
) -> dict[str, int]:
    counts = {"continued": 0, "refused": 0, "ambiguous": 0}

    async def agent(number: int) -> None:
        draw = random.Random(NUM_SESSIONS * seed + number)

        def text(request: Any) -> str:
            kind = request.seed % 3
            return CALL if kind == 0 else f"Session {number}: {request.seed % 50}."

        engine = RecordedEngine(tokenizer, text)
        session = session_of(engine, number)
        client = openai.AsyncOpenAI(base_url=url, api_key=server.open(session), max_retries=0)
        # Histories, with the tokens of the engine up to their last turn.
        known: list[tuple[History, tuple[int, ...]]] = []
        for call in range(num_calls // NUM_SESSIONS):
            base: History = [{"role": "system", "content": f"You are session {number}."}]
            tokens: tuple[int, ...] | None = None
            if known and draw.random() < 0.9:
                base, tokens = draw.choice(known[draw.choice([0, -20]) :])
                if draw.random() < 0.3:
                    base, tokens = rewritten(base, draw), None
            if base[-1].get("tool_calls"):
                new_turn = {"role": "tool", "content": f"{call}", "tool_call_id": "invented"}
            else:
                new_turn = {"role": "user", "content": f"Question {draw.randrange(1000)}"}
            base = [*base, new_turn]
            if known and draw.random() < 0.1:  # a call like an earlier one, for another draw
                base, tokens = draw.choice(known)[0][:-1], None
            sent: Any = [respelled(turn, draw) for turn in base]
            num_before, num_ambiguous = len(engine.completions), session.num_ambiguous
            try:
                # Without the client's conversion of the body, which takes 10 times as long.
                dialect = draw.choice(["chat/completions"] * 3 + ["responses", "messages"])
                path, body = call_in(dialect, sent)
                answer = await client.post(path, cast_to=object, body=body)
            except openai.BadRequestError:  # a conversation that the template does not write
                counts["refused"] += tokens is None
                assert tokens is None
                continue
            if len(engine.completions) > num_before:
                prompt, new = engine.completions[-1]
                if tokens is not None and session.num_ambiguous == num_ambiguous:
                    # The call continues exactly the tokens that the engine had sampled.
                    assert prompt[: len(tokens)] == tokens
                    counts["continued"] += 1
                turn = turn_in(dialect, answer)
                known.append(([*base, {"content": None, **turn}], (*prompt, *new)))
        counts["ambiguous"] += session.num_ambiguous
        check(session, engine, number)

    await asyncio.gather(*map(agent, range(NUM_SESSIONS)))
    return counts


def check(session: Any, engine: RecordedEngine, number: int) -> None:
    """Every token of every sample is the engine's, and each turn is trained on once."""
    sizes = {(*prompt, *new): (len(prompt), len(new)) for prompt, new in engine.completions}
    left = Counter((*prompt, *new) for prompt, new in engine.completions)  # draws may be equal
    num_turns = 0
    for sample in session.samples():
        block = sample.sequence.row.reference.block
        row, length = sample.sequence.row.number, sample.sequence.length
        ids = block["input_ids"][row].tolist()[:length]
        mask = [False, *block["token_mask"][row].tolist()][:length]
        ends = [
            at + 1 for at in range(length) if mask[at] and (at + 1 == length or not mask[at + 1])
        ]
        for end in ends:
            # A completion of this session's engine has exactly these tokens, and all before.
            tokens = tuple(ids[:end])
            start, size = sizes[tokens]
            left[tokens] -= 1
            assert left[tokens] >= 0
            assert mask[start : start + size] == [True] * size
            assert not mask[start - 1]
        num_turns += len(ends)
        assert sample.num_written == sum(mask)
        others = {f"ession {other}" for other in range(NUM_SESSIONS)} - {f"ession {number}"}
        assert not any(name in json.dumps(sample.turns) for name in others)
    assert num_turns + session.num_ambiguous == len(engine.completions)


@pytest.mark.parametrize(
    "num_calls", [500, pytest.param(10_000, marks=(pytest.mark.slow, pytest.mark.thorough))]
)
def test_no_history_is_tokenized_again_or_mixed(chat_tokenizer, served, num_calls):
    async def test(server, url):
        return await fuzz(num_calls, chat_tokenizer, server, url)

    counts = served(test)
    assert counts["continued"] > num_calls / 3
    assert 0 < counts["ambiguous"] < num_calls / 5
