"""Pool of Ray actors that process rows and are replaced when they hang or die."""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nemo_rl_core.config.environment import EnvironmentWorkers
from nemo_rl_core.config.isolation import IsolatedPackages
from nemo_rl_core.distributed.cpu_time import read_cpu_seconds
from nemo_rl_core.distributed.isolation import isolated_path, search_path
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster, start_ray
from nemo_rl_core.errors import NemoRLError, WorkerError
from nemo_rl_core.telemetry import usage

_LOG = logging.getLogger(__name__)
_START_SECONDS = 300.0
_CLOSE_SECONDS = 5.0
_TENANT = "environment actors"
_MAX_FAILED_IN_A_ROW = 32
"""Bounds the time lost to an environment that hangs on every row."""


@dataclass(frozen=True, slots=True)
class CallError:
    """Why a row has no result after two attempts: a verb in the past tense, and details."""

    what: str
    got: str


@dataclass(frozen=True, slots=True)
class _Piece:
    indices: tuple[int, ...]
    is_retry: bool = False


@dataclass(frozen=True, slots=True)
class _Call:
    actor: Any
    deadline: float
    piece: _Piece | None = None


class _Shares:
    """Starts actors on the bundles of a cluster, on the bundle with the fewest actors first."""

    def __init__(self, cluster: RayVirtualCluster, num_actors: int) -> None:
        self._cluster, self._bundles = cluster, cluster.bundles()
        self._actors: dict[Any, int] = {}
        most = -(-num_actors // len(self._bundles))
        self._num_gpus = int(cluster.admit(_TENANT).get("GPU", 0.0) / most * 1e4) / 1e4

    def start(self, remote: Any, *args: Any) -> Any:
        bundles_in_use = list(self._actors.values())
        index = min(range(len(self._bundles)), key=bundles_in_use.count)
        strategy = self._bundles[index].strategy()
        options = {"num_gpus": self._num_gpus, "scheduling_strategy": strategy}
        actor = remote.options(**options).remote(*args)
        self._actors[actor] = index
        return actor

    def forget(self, actor: Any) -> None:
        self._actors.pop(actor, None)

    def release(self) -> None:
        self._cluster.release(_TENANT)


class ActorPool:
    """Actors of one class, each in a separate process.

    Args:
        actor_class: Class of the actors, called as `actor_class(make)`. It has `start()`, which
            calls `make`; `run(rows) -> list`, which returns one result per row; and `close()`.
        make: Factory of the object that each actor runs.
        workers: Number of actors, number of rows per call, and deadline of a call.
        bundles: Cluster on whose bundles the actors run, each with a share of its bundle's GPU if
            there is one. Without it, actors see no GPU: they would use the first one of their
            machine, together with whatever computes there.
        isolation: Packages of the actors that are not the project's.
    """

    def __init__(
        self,
        actor_class: type,
        make: Callable[[], Any],
        workers: EnvironmentWorkers,
        *,
        bundles: RayVirtualCluster | None = None,
        isolation: IsolatedPackages | None = None,
    ) -> None:
        import ray

        start_ray()
        # Actors reserve no CPU, so that they fit on a cluster full of the trainer's bundles.
        # They can import the same modules as this process, such as user-defined rewards.
        variables = {"PYTHONPATH": os.pathsep.join(search_path()), **isolated_path(isolation)}
        if bundles is None or not bundles.use_gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ""
        # Set on the class, so that the options of a single actor do not replace them.
        self._remote = ray.remote(num_cpus=0, runtime_env={"env_vars": variables})(actor_class)
        self._make, self._workers, self._bundles = make, workers, bundles
        self._shares: _Shares | None = None
        self._idle: list[Any] = []
        self._busy: dict[Any, _Call] = {}
        self._num_failed_in_a_row = 0
        self.start_result: Any = None
        self.num_restarts = 0
        self._start()

    def run(self, rows: Sequence[Any]) -> list[Any]:
        """Returns one result per row, in order, or a `CallError`.

        So many failed calls in a row that the rows cannot be the cause raise WorkerError.
        """
        if not (self._idle or self._busy):
            self._start()
        try:
            return self._run(rows)
        except BaseException:
            self.close()
            raise

    def _run(self, rows: Sequence[Any]) -> list[Any]:
        size = self._workers.rows_per_call
        indices = range(len(rows))
        waiting = deque(
            _Piece(tuple(indices[start : start + size])) for start in range(0, len(rows), size)
        )
        results: dict[int, Any] = {}
        while len(results) < len(rows):
            while waiting and self._idle:
                self._call(waiting.popleft(), rows)
            self._wait(waiting, results)
        return [results[index] for index in indices]

    def call_idle(self, method: str) -> list[Any]:
        """Returns the results of a method of all idle actors that answer within the deadline."""
        import ray

        calls = [getattr(actor, method).remote() for actor in self._idle]
        results = []
        if calls:
            limit = self._workers.call_timeout_seconds
            done, _ = ray.wait(calls, num_returns=len(calls), timeout=limit)
            for call in done:
                with suppress(ray.exceptions.RayError):
                    results.append(ray.get(call))
        return results

    def close(self) -> None:
        """Ends all actors, including those that hang; the next call of `run` starts new ones."""
        import ray

        usage.unwatch(self)
        closing = [actor.close.remote() for actor in self._idle]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_SECONDS)
        for actor in [*self._idle, *(call.actor for call in self._busy.values())]:
            ray.kill(actor)
        self._idle, self._busy = [], {}
        if self._shares is not None:
            self._shares.release()
            self._shares = None

    def cpu_seconds(self, timeout_seconds: float) -> dict[str, float]:
        """Returns the CPU seconds of each idle actor by its id."""
        return read_cpu_seconds(self._idle, timeout_seconds)

    def _start(self) -> None:
        usage.watch(self)
        if self._bundles is not None:
            self._shares = _Shares(self._bundles, self._workers.num_workers)
        try:
            for _ in range(self._workers.num_workers):
                self._start_one()
            while self._busy:
                self._wait(deque(), {})
        except BaseException:
            self.close()
            raise

    def _start_one(self) -> None:
        if self._shares is None:
            actor = self._remote.remote(self._make)
        else:
            actor = self._shares.start(self._remote, self._make)
        self._busy[actor.start.remote()] = _Call(actor, time.monotonic() + _START_SECONDS)

    def _call(self, piece: _Piece, rows: Sequence[Any]) -> None:
        actor = self._idle.pop(0)
        reference = actor.run.remote([rows[index] for index in piece.indices])
        deadline = time.monotonic() + self._workers.call_timeout_seconds
        self._busy[reference] = _Call(actor, deadline, piece)

    def _wait(self, waiting: "deque[_Piece]", results: dict[int, Any]) -> None:
        import ray

        nearest = min(call.deadline for call in self._busy.values())
        ray.wait(list(self._busy), timeout=max(nearest - time.monotonic(), 0.0))
        # A call that ended between two runs is not late, even if its deadline has passed.
        ready, _ = ray.wait(list(self._busy), num_returns=len(self._busy), timeout=0)
        for reference in ready:
            self._collect(reference, self._busy.pop(reference), waiting, results)
        now = time.monotonic()
        late = [key for key, call in self._busy.items() if call.deadline <= now]
        for reference in late:
            call = self._busy.pop(reference)
            seconds = _START_SECONDS if call.piece is None else self._workers.call_timeout_seconds
            error = CallError("gave no answer", f"nothing within {seconds:g} s")
            self._replace(call, error, waiting, results)

    def _collect(
        self, reference: Any, call: _Call, waiting: "deque[_Piece]", results: dict[int, Any]
    ) -> None:
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        try:
            returned = ray.get(reference)
        except RayTaskError as error:
            if isinstance(error.cause, NemoRLError) and call.piece is None:
                ray.kill(call.actor)
                raise type(error.cause)(*error.cause.args) from error
            got = f"{type(error.cause).__name__}: {error.cause}"[:300]
            self._replace(call, CallError("raised", got), waiting, results)
        except RayActorError as error:
            self._replace(call, CallError("died", str(error).splitlines()[0]), waiting, results)
        else:
            self._idle.append(call.actor)
            if call.piece is None:
                self.start_result = returned
            else:
                self._num_failed_in_a_row = 0
                results.update(zip(call.piece.indices, returned, strict=True))

    def _replace(
        self, call: _Call, error: CallError, waiting: "deque[_Piece]", results: dict[int, Any]
    ) -> None:
        import ray

        with suppress(ray.exceptions.RayError):
            ray.kill(call.actor)
        if self._shares is not None:
            self._shares.forget(call.actor)
        if call.piece is None:
            raise WorkerError(
                "an actor for the environment did not start",
                got=f"it {error.what}: {error.got}",
                fix="run without environment_workers to see the environment's own error",
            )
        self._num_failed_in_a_row += 1
        if self._num_failed_in_a_row == _MAX_FAILED_IN_A_ROW:
            raise WorkerError(
                f"the environment failed in {_MAX_FAILED_IN_A_ROW} consecutive calls",
                got=f"the last one {error.what}: {error.got}",
                fix="fix the environment, or raise environment_workers.call_timeout_seconds",
            )
        if call.piece.is_retry:
            results.update(dict.fromkeys(call.piece.indices, error))
        else:
            waiting.extend(_Piece((index,), is_retry=True) for index in call.piece.indices)
        self.num_restarts += 1
        _LOG.warning("an environment's actor %s (%s); it is replaced", error.what, error.got)
        self._start_one()
