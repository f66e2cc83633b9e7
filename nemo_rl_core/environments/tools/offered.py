"""Tools that an environment offers to the policy, by task."""

from collections.abc import Sequence

from nemo_rl_core.config.environment import ByTask, EnvironmentConfig
from nemo_rl_core.config.multi_turn import ToolUse
from nemo_rl_core.environments.adapt import EnvironmentScorer
from nemo_rl_core.environments.interfaces import Scorer
from nemo_rl_core.environments.tools.calling import Schema
from nemo_rl_core.environments.tools.sources import schemas_of


def offered_tools(scored_by: Scorer | EnvironmentConfig) -> dict[str | None, Sequence[Schema]]:
    """Returns the schemas of an environment's tools by task; None is the key of all tasks."""
    match scored_by:
        case ToolUse(tools=tools):
            return {None: schemas_of(tools)}
        case ByTask(tasks=tasks):
            return {each.task: offered_tools(each.environment).get(None, []) for each in tasks}
        case EnvironmentScorer(environment=environment):
            return {None: getattr(environment, "tools", [])}
    return {}
