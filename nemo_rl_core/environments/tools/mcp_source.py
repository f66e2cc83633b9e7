"""Tools of a server that speaks the Model Context Protocol, over stdio or HTTP."""

import asyncio
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from nemo_rl_core.config.multi_turn import McpServer
from nemo_rl_core.distributed.event_loop import run_on_loop
from nemo_rl_core.environments.tools.calling import (
    BrokenToolError,
    Function,
    Schema,
    name_of,
)
from nemo_rl_core.errors import ConfigError

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import Tool

_START_SECONDS = 60.0
_LISTED: dict[str, list[Schema]] = {}
"""Schemas by config, so that each process asks a server once."""


class McpSource:
    """Tools of an MCP server, which is asked for them when it is made.

    Raises:
        ConfigError: If the server does not start or has no tools.
    """

    def __init__(self, config: McpServer) -> None:
        self.stateful = config.session == "episode"
        self._config = config
        key = config.model_dump_json()
        if key not in _LISTED:
            _LISTED[key] = run_on_loop(self._list())  # a notebook has a running loop in its thread
        self.schemas = _LISTED[key]

    async def open(self, row: Mapping[str, Any], stack: AsyncExitStack) -> dict[str, Function]:
        """Starts a session with the server; see `ToolSource.open`."""
        client = await self._connected(stack)
        return {name: partial(_call, client, name) for name in map(name_of, self.schemas)}

    async def _connected(self, stack: AsyncExitStack) -> "Client":
        # A client must be closed by the task that has opened it.
        from mcp import Client
        from mcp.client.stdio import StdioServerParameters, stdio_client

        config = self._config
        log = stack.enter_context(TemporaryFile("w+"))  # noqa: SIM115 (closed with the stack)
        server: Any = config.url
        if server is None:
            program, *args = config.command
            variables = {name: os.environ[name] for name in config.variables if name in os.environ}
            parameters = StdioServerParameters(command=program, args=args, env=variables)
            server = stdio_client(parameters, errlog=log)
        started: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        is_over = asyncio.Event()

        async def serve() -> None:
            try:
                async with asyncio.timeout(_START_SECONDS) as limit, Client(server) as client:
                    limit.reschedule(None)
                    started.set_result(client)
                    await is_over.wait()
            # Broad on purpose: a transport may raise anything, also in groups.
            except Exception as error:  # noqa: BLE001 (raised by whoever waits for the start)
                if not started.done():
                    log.seek(0)
                    started.set_exception(_unreachable(config, error, log.read()))

        task = asyncio.create_task(serve())

        async def end() -> None:
            is_over.set()
            await asyncio.wait([task])  # a cancellation must not keep it from killing the server

        stack.push_async_callback(end)
        return await started

    async def _list(self) -> list[Schema]:
        schemas: list[Schema] = []
        async with AsyncExitStack() as stack:
            client = await self._connected(stack)
            cursor: str | None = ""
            try:
                async with asyncio.timeout(_START_SECONDS):
                    while cursor is not None:
                        page = await client.list_tools(cursor=cursor or None)
                        schemas += map(_schema, page.tools)
                        cursor = page.next_cursor or None
            # Broad on purpose, as above.
            except Exception as error:
                raise _unreachable(self._config, error, "") from error
        if not schemas:
            raise _unreachable(self._config, ValueError("a server without tools"), "")
        return schemas


def is_call_of_server(function: Function) -> bool:
    """Whether a function of a tool calls an MCP server."""
    return isinstance(function, partial) and function.func is _call


def _schema(tool: "Tool") -> Schema:
    function = {
        "name": tool.name,
        "description": tool.description or tool.title or "",
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}


async def _call(client: "Client", tool: str, /, **arguments: Any) -> str:
    from mcp.shared.exceptions import MCPError
    from mcp_types import CONNECTION_CLOSED

    try:
        result = await client.call_tool(tool, arguments)
    except MCPError as error:
        if error.code != CONNECTION_CLOSED:
            raise ValueError(str(error)) from error
        raise _broken(tool, error) from error
    except (RuntimeError, ValueError) as error:  # a result that does not fit its schema
        raise ValueError(str(error)) from error
    # Broad on purpose: each transport has its errors for a server that has ended.
    except Exception as error:
        raise _broken(tool, error) from error
    parts = [getattr(each, "text", f"[{each.type}]") for each in result.content]
    if result.is_error:
        raise ValueError("\n".join(parts))
    return "\n".join(parts)


def _broken(tool: str, error: Exception) -> BrokenToolError:
    return BrokenToolError(
        f"the MCP server of the tool {tool!r} does not answer",
        got=f"{type(error).__name__}: {str(error)[:160]}",
        fix="see why the server has ended; it is started again for the next call",
    )


def _unreachable(config: McpServer, error: Exception, log: str) -> ConfigError:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    name = config.url or " ".join(config.command)
    last = "".join(log.strip().splitlines()[-1:])
    return ConfigError(
        f"environment.tools: the MCP server {name!r:.80} cannot be asked for its tools",
        expected="a server that lists at least one tool within 60 s",
        got=last or f"{type(error).__name__}: {str(error)[:160]}",
        fix="run the command in a terminal: it must print nothing but the protocol to stdout",
    )
