"""Scorers and environments in Ray actors, so that a hang or crash costs only the rows it affects.

They must be stateless between two calls: any actor may get any rows, and a row may be scored twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nemo_rl_core.config.environment import EnvironmentWorkers
from nemo_rl_core.config.isolation import IsolatedPackages
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
    """Scorer that runs in actors.

    If an actor hangs past the deadline or dies, new actors retry its rows one by one; a row that
    fails again has no score. Models of dedicated bundles stay in memory.
    """

    def __init__(
        self,
        make: Callable[[], Scorer],
        workers: EnvironmentWorkers,
        *,
        names: Sequence[str] = (),
        bundles: RayVirtualCluster | None = None,
        is_dedicated: bool = False,
        isolation: IsolatedPackages | None = None,
    ) -> None:
        self._pool = ActorPool(_ScoringActor, make, workers, bundles=bundles, isolation=isolation)
        self._names = unique_names(names)
        self._shares_gpus = bundles is not None and bundles.use_gpus and not is_dedicated

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """Returns one outcome per rollout."""
        return [_outcome(each) for each in self.score_rollouts(rollouts)]

    def score_rollouts(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Returns the rollouts with their rewards and components, or with errors."""
        pairs = zip(rollouts, self._pool.run(rollouts), strict=True)
        count_retries(sum(self._pool.call_idle("take_retries")))
        if self._shares_gpus:
            self._pool.call_idle("release_memory")
        return [
            rollout.failed(_error(rollout.prompt.text, rollout.text, result).in_one_line)
            if isinstance(result, CallError)
            else result
            for rollout, result in pairs
        ]

    def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Returns the unchanged batch, and the mean of each reward of a sum by its name."""
        return batch, component_means(batch, self._names)

    @property
    def num_restarts(self) -> int:
        """Number of actors that were replaced."""
        return self._pool.num_restarts

    def close(self) -> None:
        """Ends the actors."""
        self._pool.close()


class RemoteEnvironment:
    """Environment that runs in actors; see `RemoteScorer`."""

    def __init__(
        self,
        make: Callable[[], EnvironmentInterface],
        workers: EnvironmentWorkers,
        *,
        isolation: IsolatedPackages | None = None,
    ) -> None:
        self._pool = ActorPool(_EnvironmentActor, make, workers, isolation=isolation)

    @property
    def first_stop_strings(self) -> list[str]:
        """Stop strings of the first completion."""
        return list(self._pool.start_result)

    def step(
        self, message_log_batch: Sequence[Sequence[Message]], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        """Answers the last turn of each of `B` conversations."""
        rows = list(zip(message_log_batch, metadata, strict=True))
        pairs = zip(message_log_batch, self._pool.run(rows), strict=True)
        count_retries(sum(self._pool.call_idle("take_retries")))
        return joined_replies(
            [
                failed(_error(log[0]["content"], log[-1]["content"], result))
                if isinstance(result, CallError)
                else result
                for log, result in pairs
            ]
        )

    def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Runs `post_process` on the full batch in one of the actors."""
        (result,) = self._pool.run([_FullBatch(dict(batch))])
        if isinstance(result, RewardError):
            raise result
        if isinstance(result, CallError):
            raise RewardError(
                f"an environment's actor {result.what} in {HOOK}",
                got=result.got,
                fix="fix the method, or raise environment_workers.call_timeout_seconds",
            )
        rewards, metrics = result
        return {**batch, "rewards": rewards}, metrics

    @property
    def num_restarts(self) -> int:
        """Number of actors that were replaced."""
        return self._pool.num_restarts

    def shutdown(self) -> None:
        """Ends the actors."""
        self._pool.close()


class _CountsRetries:
    _num_taken = 0

    def take_retries(self) -> int:
        """Returns the number of retries in this process since the last call."""
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
class _FullBatch:
    """Batch that an environment's actor gets instead of rows, for post-processing."""

    columns: dict[str, Any]


class _EnvironmentActor(_CountsRetries):
    def __init__(self, make: Callable[[], EnvironmentInterface]) -> None:
        self._make = make

    def start(self) -> list[str]:
        self._environment = self._make()
        return list(getattr(self._environment, "first_stop_strings", ()))

    def run(self, rows: list[Any]) -> list[Any]:
        if isinstance(rows[0], _FullBatch):
            return [self._post_process(each.columns) for each in rows]
        return self._replies(rows)

    def _replies(self, rows: list[tuple[Sequence[Message], Any]]) -> list[Reply]:
        replies = ask(
            self._environment, [log for log, _ in rows], [row_metadata for _, row_metadata in rows]
        )
        return [failed(each) if isinstance(each, RewardError) else each for each in replies]

    def _post_process(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, float]] | RewardError:
        try:
            return post_process(self._environment, batch)
        except RewardError as error:  # the caller raises it: the actor itself has not failed
            return error

    def close(self) -> None:
        end = getattr(self._environment, "shutdown", None)
        if callable(end):
            end()


def _outcome(scored: Rollout) -> float | RewardError:
    if scored.reward is not None:
        return scored.reward
    return RewardError(scored.error or "the scorer gave neither a reward nor an error")


def _error(prompt: str, completion: str, error: CallError) -> RewardError:
    source = "the environment's actor"
    return failure(error.what, error.got, prompt=prompt, completion=completion, source=source)
