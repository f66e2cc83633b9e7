"""Prompts to sample from, with the tools that their environment offers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl_core.config.environment import ByTask, EnvironmentConfig
from nemo_rl_core.config.multi_turn import ToolUse
from nemo_rl_core.data.loader import load_prompts
from nemo_rl_core.data.sampled_turns import TurnReader
from nemo_rl_core.data.tools import ToolsByTask
from nemo_rl_core.data.written import written_tools
from nemo_rl_core.environments.adapt import EnvironmentScorer
from nemo_rl_core.environments.interfaces import Scorer
from nemo_rl_core.environments.tools.sources import schemas_of
from nemo_rl_core.types import Prompt


def load_sampled_prompts(
    folder: Path,
    tokenizer: Any,
    scored_by: Scorer | EnvironmentConfig,
    *,
    max_prompt_tokens: int,
) -> Sequence[Prompt]:
    """Loads prompts whose chat template shows the tools of the environment; see `load_prompts`.

    A row with `tools` gets only those that it names. A template that does not write tools gets
    none: the policy then calls them in text.

    Args:
        max_prompt_tokens: Maximum length of a prompt with tools.

    Raises:
        ConfigError: If no parser can read the calls that the template writes.
    """
    offered = written_tools(tools_by_task(scored_by), tokenizer)
    if not offered:
        return load_prompts(folder, tokenizer)
    TurnReader(tokenizer).require_calls()
    return load_prompts(folder, tokenizer, offered=offered, max_prompt_tokens=max_prompt_tokens)


def tools_by_task(scored_by: Scorer | EnvironmentConfig | None) -> ToolsByTask:
    """Returns the tools of an environment; starts an MCP server to ask it for its own."""
    match scored_by:
        case ToolUse(tools=tools):
            return {"": schemas_of(tools)}
        case ByTask(tasks=tasks):
            return {each.task: tools_by_task(each.environment).get("", []) for each in tasks}
        case EnvironmentScorer(environment=environment):
            return {"": getattr(environment, "tools", [])}
    return {}
