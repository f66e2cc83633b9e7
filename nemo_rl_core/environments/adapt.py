"""Whatever a user has as a reward, as a scorer."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl_core.environments.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    Message,
    Scorer,
    failure,
)
from nemo_rl_core.environments.multi_turn.replies import (
    Reply,
    checked_replies,
    failed,
    joined_replies,
    source_of,
)
from nemo_rl_core.environments.rewards.functional_reward import FunctionalRewardWrapper
from nemo_rl_core.environments.rewards.weighted_sum import WeightedSumScorer
from nemo_rl_core.errors import ConfigError, RewardError
from nemo_rl_core.types import Completion, Prompt, Rollout

_ROW_KEYS = ("answer", "task")
"""What a conversation's metadata holds besides the row's own."""


def as_scorer(reward: Any, weights: Sequence[float] | None = None) -> Scorer:
    """A scorer, made of what is given.

    Args:
        reward: A scorer, an environment (whatever has a method `step`), a reward function (see
            `FunctionalRewardWrapper`), or a list of functions and scorers, whose rewards are added.
        weights: Of the rewards of a list, in its order; None weighs each by 1.

    Raises:
        ConfigError: If it is none of these, or there is not one finite weight for each reward.
    """
    if isinstance(reward, list | tuple):
        return _weighted_sum(reward, weights)
    if weights is not None:
        raise ConfigError(
            "reward_weights are the weights of several rewards",
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
        "this is no reward",
        expected="a function of a completion, a list of such functions, or an environment",
        got=repr(reward)[:120],
        fix="pass the function itself as reward_fn, not its result",
    )


def _weighted_sum(rewards: Sequence[Any], weights: Sequence[float] | None) -> Scorer:
    weights = [1.0] * len(rewards) if weights is None else list(weights)
    are_finite = all(isinstance(each, int | float) and math.isfinite(each) for each in weights)
    if not rewards or len(weights) != len(rewards) or not are_finite:
        raise ConfigError(
            "a list of rewards has a finite weight for each of them",
            expected=f"{len(rewards) or 'at least one reward, and as many'} reward_weights",
            got=f"{len(rewards)} rewards, reward_weights {weights!r:.80}",
            fix="pass reward_fn=[first, second] with reward_weights=[1.0, 0.5]",
        )
    scorers = [as_scorer(each) for each in rewards]
    for given, scorer in zip(rewards, scorers, strict=True):
        if isinstance(scorer, EnvironmentScorer):
            raise ConfigError(
                "an environment answers, so that its rewards cannot be added to others",
                expected="functions and scorers in the list",
                got=source_of(given),
                fix="add the rewards in its method step",
            )
    names = [str(getattr(each, "name", type(each).__name__)) for each in scorers]
    # A lambda has no name that a metric could have.
    known = [n if n.isidentifier() else f"reward_{place}" for place, n in enumerate(names, 1)]
    return WeightedSumScorer(scorers, weights, known)


def as_environment(scorer: Scorer) -> EnvironmentInterface:
    """The environment that a scorer is a view of, or one that ends after a turn."""
    if isinstance(scorer, EnvironmentScorer):
        return scorer.environment
    return ScorerEnvironment(scorer)


class EnvironmentScorer(Scorer):
    """A single-turn view of an environment: one exchange in, one reward out.

    Args:
        environment: Gets conversations of a user's and an assistant's turn, and for each the row's
            `answer`, `task` and own metadata.

    Attributes:
        environment: The same, for episodes that go on after the first turn.
    """

    def __init__(self, environment: EnvironmentInterface) -> None:
        self.environment = environment

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """One outcome a rollout; an environment that wants another turn counts as a failure.

        Where the environment raises, it is asked again for each rollout alone, so that only those
        on which it raises have no score.
        """
        replies = checked_replies(self.environment, *self.conversations(rollouts))
        return [self._outcome(*pair) for pair in zip(rollouts, replies, strict=True)]

    @staticmethod
    def conversations(
        rollouts: Sequence[Rollout],
    ) -> tuple[list[list[Message]], list[dict[str, Any]]]:
        """The first exchange of each rollout, and the metadata that an episode begins with."""
        return [_log(r) for r in rollouts], [_metadata(r) for r in rollouts]

    @property
    def num_restarts(self) -> int:
        """How often a part of the environment was replaced, where it counts that."""
        return getattr(self.environment, "num_restarts", 0)

    def close(self) -> None:
        """Ends the environment, if it can be ended."""
        end = getattr(self.environment, "shutdown", None)
        if callable(end):
            end()

    def _outcome(self, rollout: Rollout, reply: Reply | RewardError) -> float | RewardError:
        if isinstance(reply, RewardError) or reply.terminated:
            return reply if isinstance(reply, RewardError) else reply.reward
        return failure(
            "asks for another turn",
            "terminateds is False",
            prompt=rollout.prompt.text,
            completion=rollout.text,
            source=source_of(self.environment),
        )


class ScorerEnvironment:
    """A scorer as an environment whose conversations have one turn.

    Args:
        scorer: Sees texts; one that reads token ids, as a reward model does, has none to read here.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def step(
        self, message_log_batch: Sequence[Sequence[Message]], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        """Scores the last turn of each of `B` conversations, and ends them."""
        pairs = zip(message_log_batch, metadata, strict=True)
        outcomes = self._scorer.score([_rollout(log, about) for log, about in pairs])
        return joined_replies(
            [failed(each) if isinstance(each, RewardError) else Reply(each) for each in outcomes]
        )

    def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """The batch as it was, and the mean of its `rewards [B]`."""
        return batch, {"mean_reward": float(batch["rewards"].float().mean())}

    def shutdown(self) -> None:
        """Closes the scorer."""
        self._scorer.close()


def _log(rollout: Rollout) -> list[Message]:
    return [
        {"role": "user", "content": rollout.prompt.text},
        {"role": "assistant", "content": rollout.text},
    ]


def _metadata(rollout: Rollout) -> dict[str, Any]:
    prompt = rollout.prompt
    return {**json.loads(prompt.metadata), "answer": prompt.answer, "task": prompt.task}


def _rollout(log: Sequence[Message], metadata: Mapping[str, Any]) -> Rollout:
    own = json.dumps({key: value for key, value in metadata.items() if key not in _ROW_KEYS})
    prompt = Prompt("", log[0]["content"], (), metadata["answer"], metadata["task"], own)
    return Rollout(prompt, Completion((), (), truncated=False), log[-1]["content"])
