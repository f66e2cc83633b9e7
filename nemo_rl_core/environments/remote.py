"""Scorers and environments in Ray actors: one that hangs or dies costs the rows that it fails on.

What runs in an actor must hold nothing between two calls: any actor may get any rows, and a row
may be scored twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nemo_rl_core.config.environment import EnvironmentWorkers
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.environments.actor_pool import ActorPool, CallError
from nemo_rl_core.environments.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    Message,
    Scorer,
    failure,
    score_rollouts,
)
from nemo_rl_core.environments.multi_turn.replies import Reply, ask, failed, joined_replies
from nemo_rl_core.environments.post_processing import HOOK, post_process
from nemo_rl_core.environments.rewards.retries import count_retries, num_retries
from nemo_rl_core.environments.rewards.weighted_sum import component_means, unique_names
from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Rollout


class RemoteScorer(Scorer):
    """A scorer in actors, some rows at a time each.

    Rows go out in the same pieces however many actors there are. A piece whose actor hangs past
    the deadline or dies is tried again row by row, by new actors; a row that fails again has no
    score.

    Args:
        make: Makes the scorer, in the actor.
        workers: How many actors, and their deadline.
        names: Of the rewards that the scorer adds, for metrics.
        bundles: As `ActorPool` takes it.
        are_own: Whether nothing else computes on these bundles, so that models stay there.

    Raises:
        NemoRLError: As `make` raises it.
        WorkerError: When the actors do not start.
    """

    def __init__(
        self,
        make: Callable[[], Scorer],
        workers: EnvironmentWorkers,
        *,
        names: Sequence[str] = (),
        bundles: RayVirtualCluster | None = None,
        are_own: bool = False,
    ) -> None:
        self._pool = ActorPool(_ScoringActor, make, workers, bundles=bundles)
        self._names = unique_names(names)
        self._shares_gpus = bundles is not None and bundles.use_gpus and not are_own

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """One outcome a rollout."""
        return [_outcome(each) for each in self.score_rollouts(rollouts)]

    def score_rollouts(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The same rollouts with their rewards and components, or with errors.

        When it returns, the actors have given the memory of GPUs back that others use, too.
        """
        pairs = zip(rollouts, self._pool.run(rollouts), strict=True)
        count_retries(sum(self._pool.call_idle("take_retries")))
        if self._shares_gpus:
            self._pool.call_idle("release_memory")
        return [
            given.failed(_error(given.prompt.text, given.text, found).in_one_line)
            if isinstance(found, CallError)
            else found
            for given, found in pairs
        ]

    def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """The batch as it was, and the mean of each reward of several by its name."""
        return batch, component_means(batch, self._names)

    @property
    def num_restarts(self) -> int:
        """How many actors were replaced."""
        return self._pool.num_restarts

    def close(self) -> None:
        """Ends the actors."""
        self._pool.close()


class RemoteEnvironment:
    """An environment in actors; see `RemoteScorer`.

    Args:
        make: Makes the environment, in the actor.
        workers: How many actors, and their deadline.

    Raises:
        NemoRLError: As `make` raises it.
        WorkerError: When the actors do not start.
    """

    def __init__(
        self, make: Callable[[], EnvironmentInterface], workers: EnvironmentWorkers
    ) -> None:
        self._pool = ActorPool(_EnvironmentActor, make, workers)

    @property
    def first_stop_strings(self) -> list[str]:
        """What ends the first completion; see `StopsFirstTurn`."""
        return list(self._pool.greeting)

    def step(
        self, message_log_batch: Sequence[Sequence[Message]], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        """Answers to the last turn of each of `B` conversations."""
        rows = list(zip(message_log_batch, metadata, strict=True))
        pairs = zip(message_log_batch, self._pool.run(rows), strict=True)
        count_retries(sum(self._pool.call_idle("take_retries")))
        return joined_replies(
            [
                failed(_error(log[0]["content"], log[-1]["content"], found))
                if isinstance(found, CallError)
                else found
                for log, found in pairs
            ]
        )

    def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """What the environment in an actor makes of the whole batch, which goes to one of them.

        Raises:
            RewardError: As `post_process` in the actor, or when the actor fails twice.
        """
        (found,) = self._pool.run([_WholeBatch(dict(batch))])
        if isinstance(found, RewardError):
            raise found
        if isinstance(found, CallError):
            raise RewardError(
                f"an environment's actor {found.what} in {HOOK}",
                got=found.got,
                fix="mend the method, or raise environment_workers.call_timeout_seconds",
            )
        rewards, metrics = found
        return {**batch, "rewards": rewards}, metrics

    @property
    def num_restarts(self) -> int:
        """How many actors were replaced."""
        return self._pool.num_restarts

    def shutdown(self) -> None:
        """Ends the actors."""
        self._pool.close()


class _CountsRetries:
    _num_taken = 0

    def take_retries(self) -> int:
        """Retries in this process since the last call."""
        before, self._num_taken = self._num_taken, num_retries()
        return self._num_taken - before


class _ScoringActor(_CountsRetries):
    def __init__(self, make: Callable[[], Scorer]) -> None:
        self._make = make

    def start(self) -> None:
        self._scorer = self._make()

    def run(self, rows: list[Rollout]) -> list[Rollout]:
        return score_rollouts(self._scorer, rows)

    def release_memory(self) -> None:
        self._scorer.release_memory()

    def close(self) -> None:
        self._scorer.close()


@dataclass(frozen=True, slots=True)
class _WholeBatch:
    """What an environment's actor gets in place of rows, in one piece."""

    columns: dict[str, Any]


class _EnvironmentActor(_CountsRetries):
    def __init__(self, make: Callable[[], EnvironmentInterface]) -> None:
        self._make = make

    def start(self) -> list[str]:
        self._environment = self._make()
        return list(getattr(self._environment, "first_stop_strings", ()))

    def run(self, rows: list[Any]) -> list[Any]:
        if isinstance(rows[0], _WholeBatch):
            return [self._post_process(each.columns) for each in rows]
        return self._replies(rows)

    def _replies(self, rows: list[tuple[Sequence[Message], Any]]) -> list[Reply]:
        replies = ask(self._environment, [log for log, _ in rows], [about for _, about in rows])
        return [failed(each) if isinstance(each, RewardError) else each for each in replies]

    def _post_process(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, float]] | RewardError:
        try:
            return post_process(self._environment, batch)
        except RewardError as error:  # raised where it is read: it is not the actor that fails
            return error

    def close(self) -> None:
        end = getattr(self._environment, "shutdown", None)
        if callable(end):
            end()


def _outcome(scored: Rollout) -> float | RewardError:
    if scored.reward is not None:
        return scored.reward
    return RewardError(scored.error or "the scorer gave neither a reward nor an error")


def _error(prompt: str, completion: str, found: CallError) -> RewardError:
    source = "the environment's actor"
    return failure(found.what, found.got, prompt=prompt, completion=completion, source=source)
