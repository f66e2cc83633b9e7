"""What scores completions, and what answers them.

- `rewards/`: what scores, a file a kind of reward;
- `multi_turn/` and `tools/`: what plays, environments that answer the policy;
- `sandbox/`: what contains, for programs that nobody trusts;
- here: the interfaces, `factory`, and what takes both scorers and environments (`adapt`,
  `by_task`, `remote` and its `actor_pool`, `post_processing`), and `targets`, which finds what a
  user has named.

Four words, each with one meaning:

- A **reward** is a number: what a rollout, or one turn of it, is worth. `Rollout.reward` holds it,
  and learning raises it. Users write one as a function, `(prompt, completion) -> float`.
- A **scorer** (`interfaces.Scorer`) gives finished completions their rewards, one each: exact,
  math, code, regex, a reward model, your function.
- An **environment** (`interfaces.EnvironmentInterface`) gets the policy's turns one by one,
  rewards each, and answers, so that the policy may go on: games and tools. The section
  `environment` of a recipe names either; `adapt` turns one into the other, a scorer being an
  environment that ends after one turn.
- A **judge** is a language model that is asked for a mark (`llm_judge`), nothing else.

A rollout is **scored** when its reward has been computed, **valid** when nothing failed, and
**graded** when its answer has been compared with the one held out (`correct`).

`factory` makes all of them from their configs.
"""

from typing import Any

from nemo_rl_core.documented_names import documented
from nemo_rl_core.environments.rewards.functional_reward import FunctionalRewardWrapper
from nemo_rl_core.environments.targets import get_environment, register_environment

__all__ = ["FunctionalRewardWrapper", "get_environment", "register_environment"]


def __getattr__(name: str) -> Any:
    return documented(__name__, name)
