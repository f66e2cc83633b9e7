"""Scorers and environments in Ray actors, so that a hang or crash costs only the rows it affects.

They must be stateless between two calls: any actor may get any rows, and a row may be scored twice.
An environment with `stateful = True` is the exception: an episode stays in one actor.
"""

from collections.abc import Awaitable, Callable, Sequence
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
from nemo_rl_core.environments.multi_turn.replies import (
    Reply,
    ask,
    checked_row,
    failed,
    joined_replies,
)
from nemo_rl_core.environments.post_processing import HOOK, post_process
from nemo_rl_core.environments.rewards.retries import count_retries, num_retries
from nemo_rl_core.environments.rewards.weighted_sum import component_means, unique_names
from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Rollout

_SOURCE = "the environment's actor"


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
    """Environment that runs in actors; see `RemoteScorer`.

    Conversations are answered in parallel. If the environment is `stateful`, each has a home actor.
    If that actor is lost, its episodes fail; if the environment is `deterministic`, their turns are
    replayed in the actor that replaces it.
    """

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
        return list(self._pool.start_result.first_stop_strings)

    def conversation(self, number: int) -> Callable[..., Awaitable[Reply | RewardError]]:
        """Returns the function that answers each turn of an episode.

        Args:
            number: Number of the episode, which determines its home actor.
        """
        self._pool.ensure_started()
        home = number % self._pool.num_actors if self._pool.start_result.is_stateful else None
        return _Conversation(self._pool, home).answer

    def step(
        self, message_log_batch: Sequence[Sequence[Message]], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        """Answers the last turn of each of `B` conversations."""
        rows = [_Turn(*row) for row in zip(message_log_batch, metadata, strict=True)]
        replies = [_reply(*pair) for pair in zip(rows, self._pool.run(rows), strict=True)]
        return joined_replies(
            [failed(each) if isinstance(each, RewardError) else each for each in replies]
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


@dataclass(frozen=True, slots=True)
class _Turn:
    """A conversation whose last turn is to be answered.

    Attributes:
        earlier: Lengths of the conversation at its earlier turns, which are answered again first;
            `metadata` is then that of the first turn.
    """

    log: Sequence[Message]
    metadata: Any
    earlier: tuple[int, ...] = ()


class _Conversation:
    def __init__(self, pool: ActorPool, home: int | None) -> None:
        self._pool, self._home = pool, home
        self._actor: Any = None  # which has the state of the episode
        self._first_metadata: Any = None
        self._lengths: tuple[int, ...] = ()

    async def answer(self, log: Sequence[Message], metadata: Any) -> Reply | RewardError:
        turn = _Turn(log, metadata)
        if self._home is None:
            (result,) = await self._pool.call([turn])
            return checked_row(_reply(turn, result), log, _SOURCE)
        if not self._lengths:
            self._first_metadata = metadata
            self._actor = self._pool.actor(self._home)
        (result,) = await self._pool.call([turn], home=self._home, actor=self._actor)
        if isinstance(result, CallError) and self._pool.start_result.is_deterministic:
            self._actor = self._pool.actor(self._home)
            turn = _Turn(log, self._first_metadata, self._lengths)
            (result,) = await self._pool.call([turn], home=self._home, actor=self._actor)
        self._lengths += (len(log),)
        return checked_row(_reply(turn, result), log, _SOURCE)


@dataclass(frozen=True, slots=True)
class _Start:
    """Attributes of an environment that has started."""

    first_stop_strings: Sequence[str]
    is_stateful: bool
    is_deterministic: bool


class _EnvironmentActor(_CountsRetries):
    def __init__(self, make: Callable[[], EnvironmentInterface]) -> None:
        self._make = make

    def start(self) -> _Start:
        self._environment = environment = self._make()
        return _Start(
            list(getattr(environment, "first_stop_strings", ())),
            is_stateful=getattr(environment, "stateful", False),
            is_deterministic=getattr(environment, "deterministic", False),
        )

    def run(self, rows: list[Any]) -> list[Any]:
        if isinstance(rows[0], _FullBatch):
            return [self._post_process(each.columns) for each in rows]
        return [(each, self.take_retries()) for each in self._replies(rows)]

    def _replies(self, rows: list[_Turn]) -> list[Reply | RewardError]:
        if rows[0].earlier:
            return [self._replayed(each) for each in rows]
        return ask(self._environment, [each.log for each in rows], [each.metadata for each in rows])

    def _replayed(self, turn: _Turn) -> Reply | RewardError:
        metadata = turn.metadata
        for length in (*turn.earlier, len(turn.log)):
            (reply,) = ask(self._environment, [turn.log[:length]], [metadata])
            if length == len(turn.log) or isinstance(reply, RewardError):
                break
            if reply.terminated or reply.observation != turn.log[length]["content"]:
                return RewardError(
                    f"the environment {type(self._environment).__name__!r} is not deterministic",
                    expected=f"the answer {turn.log[length]['content']!r:.80}, as before",
                    got=f"{reply.observation!r:.80} in a replay",
                    fix="remove deterministic = True, or make its answers depend on its input only",
                )
            metadata = reply.metadata
        return reply

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


def _reply(turn: _Turn, result: Any) -> Reply | RewardError:
    if isinstance(result, CallError):
        return _error(turn.log[0]["content"], turn.log[-1]["content"], result)
    reply: Reply | RewardError
    reply, retries = result
    count_retries(retries)
    return reply


def _error(prompt: str, completion: str, error: CallError) -> RewardError:
    return failure(error.what, error.got, prompt=prompt, completion=completion, source=_SOURCE)
