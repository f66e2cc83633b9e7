"""Ray actors that rows are handed to, and that are replaced when they hang or die."""

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_core.config.environment import EnvironmentWorkers
from nemo_rl_core.distributed.cpu_time import read_cpu_seconds
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster, start_ray
from nemo_rl_core.errors import NemoRLError, WorkerError
from nemo_rl_core.telemetry import usage

_LOG = logging.getLogger(__name__)
_START_SECONDS = 300.0
_CLOSE_SECONDS = 5.0
_MAX_FAILED_IN_A_ROW = 32
"""An environment that hangs on every row would take the deadline for each of them."""


@dataclass(frozen=True, slots=True)
class CallError:
    """Why a row has no result, though it was tried twice, the second time alone.

    Attributes:
        what: What the actor did, as a verb.
        got: How that showed.
    """

    what: str
    got: str


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of one call, by their places."""

    places: tuple[int, ...]
    is_retry: bool = False


@dataclass(frozen=True, slots=True)
class _Call:
    """What an actor is busy with; without a piece, its own start."""

    actor: Any
    deadline: float
    piece: _Piece | None = None


class _Shares:
    """Places on the bundles of a cluster, those with the fewest actors first.

    Args:
        cluster: Whose bundles they share with the worker groups.
        num_actors: The most at a time.
    """

    def __init__(self, cluster: RayVirtualCluster, num_actors: int) -> None:
        self._cluster, self._bundles = cluster, cluster.bundles()
        self._actors: dict[Any, int] = {}
        most = -(-num_actors // len(self._bundles))
        self._num_gpus = int(cluster.admit(_TENANT).get("GPU", 0.0) / most * 1e4) / 1e4

    def start(self, remote: Any, *args: Any) -> Any:
        """A new actor."""
        taken = list(self._actors.values())
        place = min(range(len(self._bundles)), key=taken.count)
        strategy = self._bundles[place].strategy()
        options = {"num_gpus": self._num_gpus, "scheduling_strategy": strategy}
        actor = remote.options(**options).remote(*args)
        self._actors[actor] = place
        return actor

    def forget(self, actor: Any) -> None:
        """After the end of an actor, whose share the next one takes."""
        self._actors.pop(actor, None)

    def give_back(self) -> None:
        """After the end of all actors."""
        self._cluster.release(_TENANT)


_TENANT = "environment actors"


class ActorPool:
    """Actors of one class, each with an object of its own.

    Args:
        actor_class: Made as `actor_class(make)`, in a process of its own. Has `start()`, which
            calls `make`; `run(rows) -> list`, one result a row; and `close()`.
        make: For the actors.
        workers: How many, how many rows a call, and the deadline of one.
        bundles: The cluster on whose bundles actors lie, each with a share of the GPU of its
            bundle, where that has one. All other actors see no GPU: they would take the first of
            their machine, beside whatever computes there.

    Attributes:
        greeting: What `start` returned.
        num_restarts: How many actors were replaced.

    Raises:
        NemoRLError: As `make` raises it.
        WorkerError: When an actor does not start.
    """

    def __init__(
        self,
        actor_class: type,
        make: Callable[[], Any],
        workers: EnvironmentWorkers,
        *,
        bundles: RayVirtualCluster | None = None,
    ) -> None:
        import ray

        start_ray()
        # The rows' own work is all that they use: they must find room beside the trainer's bundles.
        # They find the modules that this process finds, such as the user's own rewards.
        variables = {"PYTHONPATH": _search_path()}
        if bundles is None or not bundles.use_gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ""
        # Of the class, so that what a pool adds for each actor keeps them.
        self._remote = ray.remote(num_cpus=0, runtime_env={"env_vars": variables})(actor_class)
        self._make, self._workers, self._bundles = make, workers, bundles
        self._shares: _Shares | None = None
        self._idle: list[Any] = []
        self._busy: dict[Any, _Call] = {}
        self._num_failed_in_a_row = 0
        self.greeting: Any = None
        self.num_restarts = 0
        self._start()

    def run(self, rows: Sequence[Any]) -> list[Any]:
        """One result a row, in order, or a `CallError`.

        Raises:
            WorkerError: When an actor that takes another's place does not start, or so many calls
                fail after one another that it is not the rows' fault. All actors are ended then.
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
        places = range(len(rows))
        waiting = deque(
            _Piece(tuple(places[start : start + size])) for start in range(0, len(rows), size)
        )
        found: dict[int, Any] = {}
        while len(found) < len(rows):
            while waiting and self._idle:
                self._call(waiting.popleft(), rows)
            self._wait(waiting, found)
        return [found[place] for place in places]

    def call_idle(self, method: str) -> list[Any]:
        """Calls a method of every idle actor, and waits for it as long as for a call with rows.

        One that has died meanwhile is replaced when it gets rows.

        Returns:
            The results of the actors that have answered.
        """
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
        """Ends all actors, those that hang too; the next call of `run` starts others."""
        import ray

        usage.unwatch(self)
        closing = [actor.close.remote() for actor in self._idle]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_SECONDS)
        for actor in [*self._idle, *(call.actor for call in self._busy.values())]:
            ray.kill(actor)
        self._idle, self._busy = [], {}
        if self._shares is not None:
            self._shares.give_back()
            self._shares = None

    def cpu_seconds(self, timeout_seconds: float) -> dict[str, float]:
        """CPU seconds of each idle actor, by its id; others count as before."""
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
        reference = actor.run.remote([rows[place] for place in piece.places])
        deadline = time.monotonic() + self._workers.call_timeout_seconds
        self._busy[reference] = _Call(actor, deadline, piece)

    def _wait(self, waiting: "deque[_Piece]", found: dict[int, Any]) -> None:
        """Until a call has ended or passed its deadline; takes up what that means."""
        import ray

        nearest = min(call.deadline for call in self._busy.values())
        ray.wait(list(self._busy), timeout=max(nearest - time.monotonic(), 0.0))
        # All that have ended by now: what ended between two runs is not late, though its deadline
        # has passed.
        ready, _ = ray.wait(list(self._busy), num_returns=len(self._busy), timeout=0)
        for reference in ready:
            self._take_up(reference, self._busy.pop(reference), waiting, found)
        now = time.monotonic()
        late = [key for key, call in self._busy.items() if call.deadline <= now]
        for reference in late:
            call = self._busy.pop(reference)
            seconds = _START_SECONDS if call.piece is None else self._workers.call_timeout_seconds
            error = CallError("gave no answer", f"nothing within {seconds:g} s")
            self._replace(call, error, waiting, found)

    def _take_up(
        self, reference: Any, call: _Call, waiting: "deque[_Piece]", found: dict[int, Any]
    ) -> None:
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        try:
            results = ray.get(reference)
        except RayTaskError as error:
            if isinstance(error.cause, NemoRLError) and call.piece is None:
                ray.kill(call.actor)
                raise type(error.cause)(*error.cause.args) from error
            got = f"{type(error.cause).__name__}: {error.cause}"[:300]
            self._replace(call, CallError("raised", got), waiting, found)
        except RayActorError as error:
            self._replace(call, CallError("died", str(error).splitlines()[0]), waiting, found)
        else:
            self._idle.append(call.actor)
            if call.piece is None:
                self.greeting = results
            else:
                self._num_failed_in_a_row = 0
                found.update(zip(call.piece.places, results, strict=True))

    def _replace(
        self, call: _Call, error: CallError, waiting: "deque[_Piece]", found: dict[int, Any]
    ) -> None:
        """Ends an actor, starts another, and sees to the rows that it had."""
        import ray

        with suppress(ray.exceptions.RayError):
            ray.kill(call.actor)
        if self._shares is not None:
            self._shares.forget(call.actor)
        if call.piece is None:
            raise WorkerError(
                "an actor for the environment did not start",
                got=f"it {error.what}: {error.got}",
                fix="try the environment without environment_workers: the reason shows there",
            )
        self._num_failed_in_a_row += 1
        if self._num_failed_in_a_row == _MAX_FAILED_IN_A_ROW:
            raise WorkerError(
                f"the environment failed in {_MAX_FAILED_IN_A_ROW} calls after one another",
                got=f"the last one {error.what}: {error.got}",
                fix="mend the environment, or raise environment_workers.call_timeout_seconds",
            )
        if call.piece.is_retry:
            found.update(dict.fromkeys(call.piece.places, error))
        else:
            waiting.extend(_Piece((place,), is_retry=True) for place in call.piece.places)
        self.num_restarts += 1
        _LOG.warning(
            "an environment's actor %s (%s); another takes its place", error.what, error.got
        )
        self._start_one()


def _search_path() -> str:
    return os.pathsep.join(str(Path(each).absolute()) for each in sys.path)
