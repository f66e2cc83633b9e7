"""Pool of Ray actors that process rows and are replaced when they hang or die."""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nemo_rl_core.config.environment import EnvironmentWorkers
from nemo_rl_core.config.isolation import IsolatedPackages
from nemo_rl_core.distributed.cpu_time import read_cpu_seconds
from nemo_rl_core.distributed.event_loop import event_loop, run_on_loop
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
        self._actors: dict[int, Any] = {}  # by number, which a replacement keeps
        self._idle: list[int] = []
        self._waiting: list[tuple[int | None, asyncio.Future[int]]] = []
        self._calls: set[asyncio.Task[list[Any]]] = set()
        self._num_failed_in_a_row = 0
        self.start_result: Any = None
        self.num_restarts = 0
        self.ensure_started()

    def run(self, rows: Sequence[Any]) -> list[Any]:
        """Returns one result per row, in order, or a `CallError`.

        So many failed calls in a row that the rows cannot be the cause raise WorkerError.
        """
        self.ensure_started()
        try:
            return run_on_loop(self._run(rows))
        except BaseException:
            self.close()
            raise

    async def _run(self, rows: Sequence[Any]) -> list[Any]:
        size = self._workers.rows_per_call
        pieces = [rows[start : start + size] for start in range(0, len(rows), size)]
        results = await asyncio.gather(*(self.call(each) for each in pieces))
        return [result for of_piece in results for result in of_piece]

    async def call(
        self, rows: Sequence[Any], *, home: int | None = None, actor: Any = None
    ) -> list[Any]:
        """Returns one result per row, or a `CallError`; an idle actor runs all rows.

        A cancelled call continues, since its actor is busy.

        Args:
            home: Number of the actor, for rows that no other actor can run: they are not retried.
            actor: The actor itself; if it was replaced, the rows fail.
        """
        call = asyncio.create_task(self._call(rows, home=home, actor=actor))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return await asyncio.shield(call)

    async def _call(
        self, rows: Sequence[Any], *, home: int | None, actor: Any, is_retry: bool = False
    ) -> list[Any]:
        number = await self._idle_actor(home)
        try:
            if actor not in (None, self._actors[number]):
                return [CallError("was replaced", "its state is lost")] * len(rows)
            seconds = self._workers.call_timeout_seconds
            returned = await _result(self._actors[number].run.remote(list(rows)), seconds)
            if not isinstance(returned, CallError):
                self._num_failed_in_a_row = 0
                results: list[Any] = returned
                return results
            await self._replace(number, returned)
        finally:
            if number in self._actors:  # the pool was not closed
                self._idle.append(number)
                self._assign()
        if is_retry or home is not None:
            return [returned] * len(rows)
        retries = (self._call([row], home=None, actor=None, is_retry=True) for row in rows)
        return [result for (result,) in await asyncio.gather(*retries)]

    async def _idle_actor(self, home: int | None) -> int:
        number: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((home, number))
        self._assign()
        return await number

    def _assign(self) -> None:
        """Gives idle actors to calls, in the order of the calls."""
        for waiting in list(self._waiting):
            if not self._idle:
                return
            home, number = waiting
            suitable = [each for each in self._idle if home in (None, each)]
            if suitable and not number.done():
                self._idle.remove(suitable[0])
                number.set_result(suitable[0])
            if number.done():
                self._waiting.remove(waiting)

    @property
    def num_actors(self) -> int:
        """Number of actors."""
        return self._workers.num_workers

    def actor(self, number: int) -> Any:
        """Returns the actor that has a number now."""
        return self._actors[number]

    def call_idle(self, method: str) -> list[Any]:
        """Returns the results of a method of all idle actors that answer within the deadline."""
        import ray

        calls = [getattr(self._actors[each], method).remote() for each in self._idle]
        results = []
        if calls:
            limit = self._workers.call_timeout_seconds
            done, _ = ray.wait(calls, num_returns=len(calls), timeout=limit)
            for call in done:
                with suppress(ray.exceptions.RayError):
                    results.append(ray.get(call))
        return results

    def close(self) -> None:
        """Ends all actors, including those that hang; the next call starts new ones."""
        import ray

        usage.unwatch(self)
        for call in list(self._calls):
            event_loop().call_soon_threadsafe(call.cancel)
        closing = [self._actors[each].close.remote() for each in self._idle]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_SECONDS)
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors, self._idle, self._waiting = {}, [], []
        if self._shares is not None:
            self._shares.release()
            self._shares = None

    def cpu_seconds(self, timeout_seconds: float) -> dict[str, float]:
        """Returns the CPU seconds of each idle actor by its id."""
        return read_cpu_seconds([self._actors[each] for each in self._idle], timeout_seconds)

    def ensure_started(self) -> None:
        """Starts the actors, unless they are running."""
        if self._actors:
            return
        try:
            run_on_loop(self._start_all())
        except BaseException:
            self.close()
            raise

    async def _start_all(self) -> None:
        usage.watch(self)
        if self._bundles is not None:
            self._shares = _Shares(self._bundles, self.num_actors)
        await asyncio.gather(*(self._start_one(number) for number in range(self.num_actors)))
        self._idle = list(range(self.num_actors))

    async def _start_one(self, number: int) -> None:
        if self._shares is None:
            actor = self._remote.remote(self._make)
        else:
            actor = self._shares.start(self._remote, self._make)
        self._actors[number] = actor
        self.start_result = await _result(actor.start.remote(), _START_SECONDS, is_start=True)
        if isinstance(self.start_result, CallError):
            raise WorkerError(
                "an actor for the environment did not start",
                got=f"it {self.start_result.what}: {self.start_result.got}",
                fix="run without environment_workers to see the environment's own error",
            )

    async def _replace(self, number: int, error: CallError) -> None:
        import ray

        with suppress(ray.exceptions.RayError):
            ray.kill(self._actors[number])
        if self._shares is not None:
            self._shares.forget(self._actors[number])
        self._num_failed_in_a_row += 1
        if self._num_failed_in_a_row == _MAX_FAILED_IN_A_ROW:
            raise WorkerError(
                f"the environment failed in {_MAX_FAILED_IN_A_ROW} consecutive calls",
                got=f"the last one {error.what}: {error.got}",
                fix="fix the environment, or raise environment_workers.call_timeout_seconds",
            )
        self.num_restarts += 1
        _LOG.warning("an environment's actor %s (%s); it is replaced", error.what, error.got)
        await self._start_one(number)


async def _result(reference: Any, seconds: float, *, is_start: bool = False) -> Any:
    """Returns the result of an actor's call, or a `CallError`; a start raises a `NemoRLError`."""
    from ray.exceptions import RayActorError, RayTaskError

    try:
        return await asyncio.wait_for(asyncio.wrap_future(reference.future()), seconds)
    except RayTaskError as error:
        if is_start and isinstance(error.cause, NemoRLError):
            raise type(error.cause)(*error.cause.args) from error
        return CallError("raised", f"{type(error.cause).__name__}: {error.cause}"[:300])
    except RayActorError as error:
        return CallError("died", str(error).splitlines()[0])
    except TimeoutError:
        return CallError("gave no answer", f"nothing within {seconds:g} s")
