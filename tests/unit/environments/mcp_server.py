"""An MCP server over stdio for tests."""

import os

from mcp.server.mcpserver import MCPServer

server = MCPServer("cities")
calls: list[str] = []


@server.tool()
def lookup(city: str) -> str:
    """Looks up a city."""
    if city == "Atlantis":
        os._exit(3)
    calls.append(city)
    return f"{city} is call {len(calls)}"


if __name__ == "__main__":
    server.run("stdio")
