"""Scorers and multi-turn environments.

Four words, each with one meaning:

- A **reward** is the value of a rollout, or of one turn of it, which training maximizes.
- A **scorer** (`interfaces.Scorer`) gives each finished completion one reward: exact, math, code,
  regex, a reward model, your function.
- An **environment** (`interfaces.EnvironmentInterface`) gets the policy's turns one by one,
  rewards each, and answers, so that the policy can continue: games and tools. The section
  `environment` of a recipe names either; `adapt` turns one into the other.
- A **judge** is a language model that grades completions (`llm_judge`), nothing else.

A rollout is **scored** when its reward has been computed, **valid** when nothing failed, and
**graded** when its answer has been compared with the reference (`correct`).
"""

from typing import Any

from nemo_rl_core.documented_names import documented
from nemo_rl_core.environments.rewards.functional_reward import FunctionalRewardWrapper
from nemo_rl_core.environments.targets import get_environment, register_environment

__all__ = ["FunctionalRewardWrapper", "get_environment", "register_environment"]


def __getattr__(name: str) -> Any:
    return documented(__name__, name)
