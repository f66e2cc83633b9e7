"""An agent of three turns; the fault that `AGENT_FAULT` names hits some of its episodes.

The policy's first answer decides which ones, so equal runs lose the same episodes.
"""

import asyncio
import os
import signal
import zlib
from typing import Any

from openai import AsyncOpenAI

SECONDS = (0.0, 0.001, 0.004, 0.016)
"""Time from the start of a call to the signal."""


async def run(base_url: str, api_key: str, row: Any) -> float:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages, number = row["messages"], 0
    for turn in range(3):
        if turn == 1 and number % 4 == 0:
            _begin_fault(SECONDS[number // 4 % 4])
        answer = await client.chat.completions.create(model="policy", messages=messages)
        text = answer.choices[0].message.content or ""
        number = zlib.crc32(f"{row['id']} {text}".encode())
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": f"{turn}+2="})
    return number % 5 / 4


def _begin_fault(seconds: float) -> None:
    fault, _, moment = os.environ["AGENT_FAULT"].partition(" ")
    if fault == "error":
        raise LookupError("lost")
    if fault == "none":
        return
    sent = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault]
    if moment == "between calls":
        os.kill(os.getpid(), sent)
    asyncio.get_running_loop().call_later(seconds, os.kill, os.getpid(), sent)
