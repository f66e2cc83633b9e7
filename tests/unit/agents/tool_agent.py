"""Answers sums and calls its tool itself, as an agent with the client of OpenAI."""

import json
from typing import Any

from openai import AsyncOpenAI

from tests.unit.algorithms.grpo.test_tool_training import TOOLS, add


async def run(base_url: str, api_key: str, row: Any) -> float:
    from nemo_rl_core.environments.tools.sources import schemas_of

    client, messages = AsyncOpenAI(base_url=base_url, api_key=api_key), row["messages"]
    tools: Any = schemas_of(TOOLS.tools)
    while True:
        answer = await client.chat.completions.create(
            model="policy", messages=messages, tools=tools
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            return float(message.content == row["answer"])
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = add(**json.loads(call.function.arguments))  # type: ignore[union-attr]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
