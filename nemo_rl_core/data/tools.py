"""Definitions of tools in rows: their spellings, and the form that chat templates read."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl_core.data.json_values import json_default, parsed
from nemo_rl_core.errors import DataError

ToolsByTask = Mapping[str, Sequence[Mapping[str, Any]]]
"""Schemas of an environment's tools by task; the key "" is for all other tasks."""

SPELLINGS = ("tools", "functions", "available_tools")
"""Columns with definitions of tools."""

_PARAMETERS = ("parameters", "input_schema", "inputSchema")
"""Keys of the JSON schema of a tool's arguments: OpenAI, Anthropic and MCP."""

_FIX = " (data.drop_columns removes the column)"


def stored_tools(value: Any) -> str:
    """Returns definitions of tools as the JSON of a list, in the form of OpenAI's API.

    Args:
        value: A list of functions, a single one, or its JSON; a function may be JSON, too.

    Raises:
        ValueError: If a definition has no name.

    Example:
        >>> stored_tools('[{"name": "add"}]')
        '[{"type": "function", "function": {"name": "add"}}]'
        >>> stored_tools(None)
        '[]'
    """
    tools = parsed(value, (list, Mapping))
    if isinstance(tools, Mapping):
        tools = [tools]
    if not isinstance(tools or [], list):
        raise ValueError(f"has tools that are not a list: {str(tools)[:40]!r}{_FIX}")
    functions = [_function(parsed(tool, Mapping)) for tool in tools or ()]
    wrapped = [{"type": "function", "function": function} for function in functions]
    return json.dumps(wrapped, ensure_ascii=False, default=json_default)


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the definitions of the tools of a row."""
    tools: list[dict[str, Any]] = json.loads(row.get("tools") or "[]")
    return tools


def shown_tools(offered: ToolsByTask, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the tools that the prompt of a row shows.

    Args:
        offered: Tools of the environment.

    Returns:
        All tools of the row's task, or those of them that the row names. Without tools of the
        environment, those of the row.

    Raises:
        DataError: If the row names a tool that the environment does not have.
    """
    named = tools_of(row)
    tools = offered.get(row.get("task", ""), offered.get("", ()))
    if not tools:
        return named
    by_name = {each["function"]["name"]: dict(each) for each in tools}
    names = [each["function"]["name"] for each in named]
    if unknown := [name for name in names if name not in by_name]:
        raise DataError(
            f"a row names the tool {unknown[0]!r}, which the environment does not have",
            expected=f"names among {', '.join(by_name)}",
            got=f"{', '.join(names)} in the row with the prompt {row['prompt'][:80]!r}",
            fix="add it to environment.tools, or use data.drop_columns: [tools]",
        )
    return [by_name[name] for name in names] or [*by_name.values()]


def _function(tool: Any) -> dict[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"has a tool without a name: {str(tool)[:40]!r}{_FIX}")
    function = {key: value for key, value in function.items() if key != "type"}
    name = next((name for name in _PARAMETERS if name in function), None)
    if name is None:
        return function
    schema = parsed(function.pop(name), Mapping)
    # xLAM's have only the properties.
    is_bare = isinstance(schema, Mapping) and "properties" not in schema
    if is_bare and all(isinstance(each, Mapping) for each in schema.values()):
        schema = {"type": "object", "properties": schema}
    return {**function, "parameters": schema}
