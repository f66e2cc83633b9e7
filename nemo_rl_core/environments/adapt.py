"""Converts reward functions, scorers and environments into each other."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl_core.environments.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    Message,
    Scorer,
    error_context,
    failure,
)
from nemo_rl_core.environments.multi_turn.replies import (
    Reply,
    checked_replies,
    display_name,
    failed,
    joined_replies,
)
from nemo_rl_core.environments.rewards.functional_reward import FunctionalRewardWrapper
from nemo_rl_core.environments.rewards.weighted_sum import WeightedSumScorer
from nemo_rl_core.errors import ConfigError, RewardError
from nemo_rl_core.types import Completion, Prompt, Rollout

_ROW_KEYS = ("answer", "task")
"""Keys that a conversation's metadata contains in addition to the metadata of the row."""


def as_scorer(reward: Any, weights: Sequence[float] | None = None) -> Scorer:
    """Returns a scorer for a reward.

    Args:
        reward: A scorer, an environment (any object with a method `step`), a reward function (see
            `FunctionalRewardWrapper`), or a list of functions and scorers, whose rewards are added.
        weights: Weights of a list of rewards, in its order; None means weights of 1.

    Raises:
        ConfigError: If the reward is of another type, or if there is not one finite weight for
            each reward.
    """
    if isinstance(reward, list | tuple):
        return _weighted_sum(reward, weights)
    if weights is not None:
        raise ConfigError(
            "reward_weights needs several rewards",
            expected="a list of functions as reward_fn",
            got=f"reward_fn {reward!r:.80}",
            fix="leave reward_weights out, or pass reward_fn=[...]",
        )
    if isinstance(reward, Scorer):
        return reward
    if hasattr(reward, "step"):
        return EnvironmentScorer(reward)
    if callable(reward):
        return FunctionalRewardWrapper(reward)
    raise ConfigError(
        "reward_fn is not a reward",
        expected="a function of a completion, a list of such functions, or an environment",
        got=repr(reward)[:120],
        fix="pass the function itself as reward_fn, not its result",
    )


def _weighted_sum(rewards: Sequence[Any], weights: Sequence[float] | None) -> Scorer:
    weights = [1.0] * len(rewards) if weights is None else list(weights)
    are_finite = all(isinstance(each, int | float) and math.isfinite(each) for each in weights)
    if not rewards or len(weights) != len(rewards) or not are_finite:
        raise ConfigError(
            "a list of rewards needs one finite weight for each reward",
            expected=f"{len(rewards) or 'at least one reward, and as many'} reward_weights",
            got=f"{len(rewards)} rewards, reward_weights {weights!r:.80}",
            fix="pass reward_fn=[first, second] with reward_weights=[1.0, 0.5]",
        )
    scorers = [as_scorer(each) for each in rewards]
    for reward, scorer in zip(rewards, scorers, strict=True):
        if isinstance(scorer, EnvironmentScorer):
            raise ConfigError(
                "the rewards of an environment cannot be added to others, since it has turns",
                expected="functions and scorers in the list",
                got=display_name(reward),
                fix="add the rewards in its method step",
            )
    names = [str(getattr(each, "name", type(each).__name__)) for each in scorers]
    # The name of a lambda cannot be part of a metric's name.
    valid_names = [
        name if name.isidentifier() else f"reward_{index}" for index, name in enumerate(names, 1)
    ]
    return WeightedSumScorer(scorers, weights, valid_names)


def as_environment(scorer: Scorer) -> EnvironmentInterface:
    """Returns the environment inside a scorer, or else an environment that ends after one turn."""
    if isinstance(scorer, EnvironmentScorer):
        return scorer.environment
    return ScorerEnvironment(scorer)


class EnvironmentScorer(Scorer):
    """Single-turn view of an environment: one exchange in, one reward out.

    The environment gets conversations of one user turn and one assistant turn, each with the row's
    `answer`, `task` and metadata.
    """

    def __init__(self, environment: EnvironmentInterface) -> None:
        self.environment = environment

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """Returns one outcome per rollout; a request for another turn counts as a failure."""
        replies = checked_replies(self.environment, *self.conversations(rollouts))
        return [self._outcome(*pair) for pair in zip(rollouts, replies, strict=True)]

    @staticmethod
    def conversations(
        rollouts: Sequence[Rollout],
    ) -> tuple[list[list[Message]], list[dict[str, Any]]]:
        """Returns the first exchange and the initial metadata of each rollout."""
        logs: list[list[Message]] = []
        metadata: list[dict[str, Any]] = []
        for rollout in rollouts:
            prompt, reply = rollout.prompt, {"role": "assistant", "content": rollout.text}
            logs.append([{"role": "user", "content": prompt.text}, reply])
            stored = json.loads(prompt.metadata)
            metadata.append({**stored, "answer": prompt.answer, "task": prompt.task})
        return logs, metadata

    @property
    def num_restarts(self) -> int:
        """Number of actors that were replaced, or 0 if the environment has none."""
        return getattr(self.environment, "num_restarts", 0)

    def close(self) -> None:
        """Shuts the environment down, if it has a method for that."""
        end = getattr(self.environment, "shutdown", None)
        if callable(end):
            end()

    def _outcome(self, rollout: Rollout, reply: Reply | RewardError) -> float | RewardError:
        if isinstance(reply, RewardError) or reply.terminated:
            return reply if isinstance(reply, RewardError) else reply.reward
        context = error_context(rollout, display_name(self.environment))
        return failure("asks for another turn", "terminateds is False", **context)


class ScorerEnvironment:
    """Scorer of texts as an environment whose conversations have one turn.

    A scorer that reads token ids, such as a reward model, does not work here.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def step(
        self, message_log_batch: Sequence[Sequence[Message]], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        """Scores the last turn of each of `B` conversations, and ends them."""
        pairs = zip(message_log_batch, metadata, strict=True)
        outcomes = self._scorer.score([_rollout(log, row_metadata) for log, row_metadata in pairs])
        return joined_replies(
            [failed(each) if isinstance(each, RewardError) else Reply(each) for each in outcomes]
        )

    def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Returns the unchanged batch and the mean of its `rewards [B]`."""
        return batch, {"mean_reward": float(batch["rewards"].float().mean())}

    def shutdown(self) -> None:
        """Closes the scorer."""
        self._scorer.close()


def _rollout(log: Sequence[Message], metadata: Mapping[str, Any]) -> Rollout:
    other_metadata = json.dumps(
        {key: value for key, value in metadata.items() if key not in _ROW_KEYS}
    )
    prompt = Prompt("", log[0]["content"], (), metadata["answer"], metadata["task"], other_metadata)
    return Rollout(prompt, Completion((), (), truncated=False), log[-1]["content"])
