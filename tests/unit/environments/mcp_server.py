"""An MCP server for tests, over stdio or, with a port as argument, over HTTP."""

import os
import signal
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("cities")
calls: list[str] = []


@server.tool()
def lookup(city: str) -> str:
    """Looks up a city."""
    if city == "process":
        return str(os.getpid())
    if city == "Atlantis":
        os._exit(3)
    if city == "Pompeii":
        os.kill(os.getpid(), signal.SIGSTOP)
    calls.append(city)
    return f"{city} is call {len(calls)}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
