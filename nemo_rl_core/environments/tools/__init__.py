"""Conversations in which the policy calls tools; see `environment.ToolEnvironment`."""

from collections.abc import Iterable
from pathlib import Path

from nemo_rl_core.config.multi_turn import CalculatorTool, PythonTool, RetrieverTool, ToolConfig
from nemo_rl_core.environments.tools.environment import Tool, ToolEnvironment

__all__ = ["Tool", "ToolEnvironment", "make_tools"]


def make_tools(configs: Iterable[ToolConfig]) -> dict[str, Tool]:
    """Returns the tools by name."""
    return {config.kind: _make_tool(config) for config in configs}


def _make_tool(config: ToolConfig) -> Tool:
    match config:
        case CalculatorTool():
            from nemo_rl_core.environments.tools.calculator import calculate

            return calculate
        case PythonTool():
            from nemo_rl_core.environments.sandbox import Limits
            from nemo_rl_core.environments.tools.python import PythonRunner

            return PythonRunner(Limits(config.cpu_seconds, config.wall_seconds, config.memory_mib))
        case RetrieverTool():
            from nemo_rl_core.environments.tools.retriever import Retriever

            path = Path(config.path).expanduser()
            return Retriever.from_file(path, num_passages=config.num_passages)
