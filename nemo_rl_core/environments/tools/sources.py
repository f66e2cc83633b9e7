"""Tools by where they come from: built in, Python functions, objects of a class, MCP servers.

A source has the schemas of its tools, and opens functions to call: once, or for each episode.
"""

import inspect
from asyncio import Lock
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import wraps
from pathlib import Path
from typing import Any, Protocol

from nemo_rl_core.config.multi_turn import (
    CalculatorTool,
    FunctionTool,
    McpServer,
    PythonTool,
    RetrieverTool,
    ToolConfig,
)
from nemo_rl_core.environments.targets import import_function
from nemo_rl_core.environments.tools.calling import Function, Schema, invoke, name_of
from nemo_rl_core.errors import ConfigError


class ToolSource(Protocol):
    """Tools that are opened together.

    Attributes:
        schemas: Schemas of the tools.
        stateful: Whether each episode opens the tools again.
    """

    schemas: list[Schema]
    stateful: bool

    async def open(self, row: Mapping[str, Any], stack: AsyncExitStack) -> dict[str, Function]:
        """Returns the functions by name; what they need is closed with the stack.

        Args:
            row: Columns of the episode's row; empty if the source is not stateful.
        """
        ...


def make_source(config: ToolConfig) -> ToolSource:
    """Makes the source that a config describes.

    Raises:
        ConfigError: If a function or its documentation does not make a schema, or a server cannot
            be asked for its tools.
    """
    match config:
        case CalculatorTool():
            from nemo_rl_core.environments.tools.calculator import calculate

            return _TextTool(config.kind, calculate)
        case PythonTool():
            from nemo_rl_core.environments.sandbox import Limits
            from nemo_rl_core.environments.tools.python import PythonRunner

            limits = Limits(config.cpu_seconds, config.wall_seconds, config.memory_mib)
            return _TextTool(config.kind, PythonRunner(limits))
        case RetrieverTool():
            from nemo_rl_core.environments.tools.retriever import Retriever

            path = Path(config.path).expanduser()
            return _TextTool(
                config.kind, Retriever.from_file(path, num_passages=config.num_passages)
            )
        case FunctionTool():
            return _function_source(config)
        case McpServer():
            from nemo_rl_core.environments.tools.mcp_source import McpSource

            return McpSource(config)


def schemas_of(configs: Sequence[ToolConfig]) -> list[Schema]:
    """Returns the schemas of tools, without reading passages or starting programs.

    Raises:
        ConfigError: If two tools have the same name, or a tool cannot be described.
    """
    schemas = [
        schema
        for config in configs
        for schema in (
            [_SCHEMAS[config.kind]] if config.kind in _SCHEMAS else make_source(config).schemas
        )
    ]
    names = [name_of(schema) for schema in schemas]
    if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ConfigError(
            f"environment.tools has several tools of the name {repeated[0]!r}",
            expected="a different name for each tool",
            got=", ".join(names),
            fix="rename one of the functions",
        )
    return schemas


def _text_schema(name: str, description: str, argument: str, about: str) -> Schema:
    properties = {argument: {"type": "string", "description": about}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


_SCHEMAS = {
    "calculator": _text_schema(
        "calculator",
        "Calculates the value of an arithmetic expression.",
        "expression",
        "Numbers with + - * / // % ** and parentheses.",
    ),
    "python": _text_schema(
        "python",
        "Runs a Python program and returns what it prints.",
        "program",
        "A complete program; nothing is kept between programs.",
    ),
    "retriever": _text_schema(
        "retriever", "Returns the best passages for a query.", "query", "Words to search for."
    ),
}


class _TextTool:
    """A built-in tool, which maps a text to a text."""

    stateful = False

    def __init__(self, kind: str, function: Callable[[str], str]) -> None:
        self.schemas, self._function = [_SCHEMAS[kind]], function

    async def open(self, row: Mapping[str, Any], stack: AsyncExitStack) -> dict[str, Function]:
        return {name_of(self.schemas[0]): self._call}

    def _call(self, **arguments: str) -> str:
        (text,) = arguments.values()
        return self._function(text)


class _FunctionSource:
    stateful = False

    def __init__(self, function: Function, schema: Schema) -> None:
        self.schemas = [schema]
        self._functions = {schema["function"]["name"]: function}

    async def open(self, row: Mapping[str, Any], stack: AsyncExitStack) -> dict[str, Function]:
        return self._functions


class _ClassSource:
    """Public methods of an object of the episode, which are called one after another."""

    stateful = True

    def __init__(self, config: FunctionTool, made: type, schemas: list[Schema]) -> None:
        self.schemas = schemas
        self._config, self._class = config, made

    async def open(self, row: Mapping[str, Any], stack: AsyncExitStack) -> dict[str, Function]:
        state = await invoke(self._class, self._config.arguments)
        if (close := getattr(state, "close", None)) is not None:
            stack.push_async_callback(invoke, close, {})
        if (reset := getattr(state, "reset", None)) is not None:
            takes_columns = any(
                each.kind is inspect.Parameter.VAR_KEYWORD
                for each in inspect.signature(reset).parameters.values()
            )
            opening = await invoke(reset, row if takes_columns else {"row": row})
            if opening is not None:
                raise ConfigError(
                    f"{self._config.target}.reset returned {type(opening).__name__}",
                    expected="None: the first prompt is made from the row, before the episode",
                    fix="write what the policy reads first into the prompt of the row",
                )
        lock = Lock()
        return {name: _in_order(lock, getattr(state, name)) for name in map(name_of, self.schemas)}


def _in_order(lock: Lock, method: Function) -> Function:
    @wraps(method)
    async def call(**arguments: Any) -> Any:
        async with lock:  # first come, first served
            return await invoke(method, arguments)

    return call


def _function_source(config: FunctionTool) -> ToolSource:
    target = import_function(
        config.target, of="environment.tools", expected="a function, or a class with methods"
    )
    if not inspect.isclass(target):
        return _FunctionSource(target, _schema(target, config.target))
    try:
        inspect.signature(target).bind(**config.arguments)
    except TypeError as error:
        raise ConfigError(
            f"environment.tools: the arguments do not fit {config.target!r}",
            expected=f"{target.__name__}{inspect.signature(target)}",
            got=f"{config.arguments or 'no arguments'}: {error}",
            fix="write {kind: function, target: ..., arguments: {...}}",
        ) from error
    methods = {
        name: method
        for name, method in inspect.getmembers(target)
        if (inspect.isfunction(method) or inspect.ismethod(method))
        and not name.startswith("_")
        and name not in ("reset", "close")
    }
    if not methods:
        raise ConfigError(
            f"environment.tools: the class {config.target!r} has no tools",
            expected="public methods, besides reset and close",
            fix="add a method with type hints and a docstring",
        )
    schemas = [_schema(each, f"{config.target}.{name}") for name, each in methods.items()]
    return _ClassSource(config, target, schemas)


def _schema(function: Function, target: str) -> Schema:
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
    )

    try:
        schema: Schema = get_json_schema(function)
    # NameError: a type hint that is imported only for type checkers.
    except (DocstringParsingException, TypeHintParsingException, NameError, TypeError) as error:
        raise ConfigError(
            f"environment.tools: {target!r} cannot be described to the policy",
            expected="type hints of all parameters, and a docstring with a summary and a section "
            "Args that describes each of them",
            got=" ".join(map(str, error.args))[:200],
            fix="add a type hint and a line `name: description` under Args for each parameter",
        ) from error
    if not schema["function"]["description"]:
        raise ConfigError(
            f"environment.tools: the docstring of {target!r} has no summary",
            expected="a docstring that begins with what the tool does",
            fix="add it: the policy reads it",
        )
    return schema
