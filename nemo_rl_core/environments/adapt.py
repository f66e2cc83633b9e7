"""Whatever a user has as a reward, as a scorer."""

import json
from collections.abc import Sequence
from typing import Any

from nemo_rl_core.environments.functional_reward import FunctionalRewardWrapper
from nemo_rl_core.environments.interfaces import (
    EnvironmentInterface,
    Scorer,
    attempt,
    checked,
    failure,
)
from nemo_rl_core.errors import ConfigError, RewardError
from nemo_rl_core.types import Rollout


def as_scorer(reward: Any) -> Scorer:
    """A scorer, made of what is given.

    Args:
        reward: A scorer, an environment (whatever has a method `step`), or a callable of
            `(prompt, response)` or of lists of them.

    Raises:
        ConfigError: If it is none of these.
    """
    if isinstance(reward, Scorer):
        return reward
    if hasattr(reward, "step"):
        return EnvironmentScorer(reward)
    if callable(reward):
        return FunctionalRewardWrapper(reward)
    raise ConfigError(
        "this is no reward",
        expected="a function of (prompt, response), one of lists of them, or an environment",
        got=repr(reward)[:120],
        fix="pass the function itself as reward_fn, not its result",
    )


class EnvironmentScorer(Scorer):
    """A single-turn view of an environment: one exchange in, one reward out.

    Args:
        environment: Gets conversations of a user's and an assistant's turn, and for each the row's
            `answer`, `task` and own metadata.

    Attributes:
        environment: For whoever goes on after the first exchange.
    """

    def __init__(self, environment: EnvironmentInterface) -> None:
        self.environment = environment
        self._source = f"the environment {type(environment).__name__!r}"

    def outcomes(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """One outcome a rollout; an environment that wants another turn counts as a failure."""
        if not rollouts:
            return []
        logs = [
            [
                {"role": "user", "content": rollout.prompt.text},
                {"role": "assistant", "content": rollout.text},
            ]
            for rollout in rollouts
        ]
        metadata = [
            {**json.loads(r.prompt.metadata), "answer": r.prompt.answer, "task": r.prompt.task}
            for r in rollouts
        ]
        returned: list[Any] = []

        def step() -> float:
            returned.append(self.environment.step(logs, metadata))
            return 0.0

        first = rollouts[0]
        problem = attempt(
            step, prompt=first.prompt.text, completion=first.text, source=self._source
        )
        if isinstance(problem, RewardError):
            return [problem] * len(rollouts)
        rewards, ended = returned[0].rewards.tolist(), returned[0].terminateds.tolist()
        if len(rewards) != len(rollouts) or len(ended) != len(rollouts):
            got = f"{len(rewards)} rewards for {len(rollouts)} completions"
            wrong = failure(
                "returned a wrong number of rewards",
                got,
                prompt=first.prompt.text,
                completion=first.text,
                source=self._source,
            )
            return [wrong] * len(rollouts)
        return [
            self._outcome(rollout, reward, done)
            for rollout, reward, done in zip(rollouts, rewards, ended, strict=True)
        ]

    def close(self) -> None:
        """Ends the environment, if it can be ended."""
        end = getattr(self.environment, "shutdown", None)
        if callable(end):
            end()

    def _outcome(self, rollout: Rollout, reward: Any, ended: bool) -> float | RewardError:
        about = {
            "prompt": rollout.prompt.text,
            "completion": rollout.text,
            "source": self._source,
        }
        if not ended:
            return failure("asks for another turn", "terminateds is False", **about)
        return checked(reward, **about)
