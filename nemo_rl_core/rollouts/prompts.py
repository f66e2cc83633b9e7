"""Prompts to sample from, with the tools that their environment offers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl_core.config.environment import ByTask, EnvironmentConfig
from nemo_rl_core.config.multi_turn import ToolUse
from nemo_rl_core.data.loader import ShownTools, load_prompts
from nemo_rl_core.data.sampled_turns import TurnReader
from nemo_rl_core.data.written import writes_tools
from nemo_rl_core.environments.adapt import EnvironmentScorer
from nemo_rl_core.environments.interfaces import Scorer
from nemo_rl_core.environments.tools.calling import Schema, name_of
from nemo_rl_core.environments.tools.sources import schemas_of
from nemo_rl_core.errors import DataError
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
    shown = shown_tools(scored_by, tokenizer)
    if shown is None:
        return load_prompts(folder, tokenizer)
    TurnReader(tokenizer).require_calls()
    return load_prompts(folder, tokenizer, shown_tools=shown, max_prompt_tokens=max_prompt_tokens)


def shown_tools(scored_by: Scorer | EnvironmentConfig, tokenizer: Any) -> ShownTools | None:
    """Returns a function of the tools of a prompt; None if the environment's are not shown."""
    by_task = _offered_tools(scored_by)
    template = tokenizer.get_chat_template() if tokenizer.chat_template else None
    if not any(by_task.values()) or not writes_tools(tokenizer, template, "user"):
        return None

    def shown(task: str, named: str) -> str:
        offered = by_task.get(task, by_task.get(None, []))
        if not offered:
            return named
        by_name = {name_of(each): each for each in offered}
        names = [name_of(each) for each in json.loads(named)]
        if unknown := [name for name in names if name not in by_name]:
            raise DataError(
                f"a row names the tool {unknown[0]!r}, which the environment does not have",
                expected=f"names among {', '.join(by_name)}",
                fix="add it to environment.tools, or use data.drop_columns: [tools]",
            )
        return json.dumps([by_name[name] for name in names] or offered, ensure_ascii=False)

    return shown


def _offered_tools(scored_by: Scorer | EnvironmentConfig) -> dict[str | None, Sequence[Schema]]:
    """Returns the schemas of an environment's tools by task; None is the key of all tasks."""
    match scored_by:
        case ToolUse(tools=tools):
            return {None: schemas_of(tools)}
        case ByTask(tasks=tasks):
            return {each.task: _offered_tools(each.environment).get(None, []) for each in tasks}
        case EnvironmentScorer(environment=environment):
            return {None: getattr(environment, "tools", [])}
    return {}
