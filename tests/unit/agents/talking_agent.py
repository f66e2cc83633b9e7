"""Talks with the policy in four turns, as an agent with the client of OpenAI."""

from typing import Any

from openai import AsyncOpenAI


async def run(base_url: str, api_key: str, row: Any) -> float:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages, num_turns = row["messages"], 0
    while num_turns < 4:
        answer = await client.chat.completions.create(model="policy", messages=messages)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        messages.append({"role": "user", "content": "Go on, please, with what is next. " * 2})
        num_turns += 1
    return float(num_turns)
