"""CPU time that the endpoint for agents adds to a call: HTTP, matching, rendering, reading.

The client is another process; the engine's own time is subtracted. Run from the repository:

    .venv/bin/python -m tests.benchmarks.agent_endpoint

Conversations of 1, 5 and 20 calls with 300 to 400 characters per turn, on 2 shared cores of an EPYC
(27 November 2026, two runs): 2.5 to 3.4 CPU-ms per call, and 2.9 to 4.5 with a tool.
"""

import asyncio
import json
import sys
import time
from typing import Any

from rich.console import Console

from nemo_rl_core.agents.server import AgentServer
from tests.unit.agents.conftest import ADD, CALL, RecordedEngine, build_chat_tokenizer, session_of

CLIENT = """
import http.client, json, sys
url, key, num_episodes, num_calls, tools = sys.argv[1:]
connection = http.client.HTTPConnection(url.split("/")[2])
for episode in range(int(num_episodes)):
    messages = [
        {"role": "system", "content": "You are helpful. " * 20},
        {"role": "user", "content": f"Episode {episode}"},
    ]
    for _ in range(int(num_calls)):
        body = json.dumps({"model": "any", "messages": messages, "tools": json.loads(tools)})
        headers = {"authorization": f"Bearer {key}"}
        connection.request("POST", "/v1/chat/completions", body, headers)
        message = json.loads(connection.getresponse().read())["choices"][0]["message"]
        role = "tool" if message.get("tool_calls") else "user"
        messages += [message, {"role": role, "content": "Go on. " * 40, "tool_call_id": "x"}]
"""


async def cpu_milliseconds(tokenizer: Any, num_calls: int, tools: list[Any]) -> float:
    """Returns the endpoint's CPU time per call."""
    of_engine = 0.0

    class TimedEngine(RecordedEngine):
        async def __call__(self, request: Any) -> Any:
            nonlocal of_engine
            start = time.process_time()
            result = await super().__call__(request)
            of_engine += time.process_time() - start
            return result

    def text(request: Any) -> str:
        return CALL if tools and request.seed % 2 else "The answer. " * 25

    server = AgentServer()
    url = await server.start()
    key = server.open(session_of(TimedEngine(tokenizer, text)))

    async def run(num_episodes: int) -> None:
        arguments = [url, key, str(num_episodes), str(num_calls), json.dumps(tools)]
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, *arguments)
        assert await client.wait() == 0

    await run(1)
    of_engine, start = 0.0, time.process_time()
    await run(10)
    total = time.process_time() - start - of_engine
    await server.stop()
    return total / (10 * num_calls) * 1000


def main() -> None:
    """Prints the CPU time per call."""
    tokenizer, console = build_chat_tokenizer(), Console()
    for num_calls in (1, 5, 20):
        for tools in ([], [ADD]):
            cost = asyncio.run(cpu_milliseconds(tokenizer, num_calls, tools))
            name = "with a tool" if tools else "without tools"
            console.print(f"{num_calls:3} calls {name}: {cost:.2f} CPU-ms per call")


if __name__ == "__main__":
    main()
