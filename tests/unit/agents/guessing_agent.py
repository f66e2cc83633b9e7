"""Plays the guessing game with the policy as the player, as an agent with the client of OpenAI."""

import re
from typing import Any

from openai import AsyncOpenAI


async def run(base_url: str, api_key: str, row: Any) -> float:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    secret, low, high = (row["game"][name] for name in ("secret", "low", "high"))
    messages, reward = row["messages"], 0.0
    for _ in range(row["max_turns"]):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        text = answer.choices[0].message.content or ""
        guess = int(text) if re.fullmatch(r"[0-9]{1,6}", text.strip()) else None
        if guess == secret:
            return reward + 1.0
        if guess is None or not low <= guess <= high:
            reward -= 0.25
        elif guess < secret:
            low = guess + 1
        else:
            high = guess - 1
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": f"{low}-{high}="})
    return reward
