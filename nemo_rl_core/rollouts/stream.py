"""Rollouts of several steps under way at once, for a trainer that does not wait for its engine.

A separate thread collects completions of the engine, submits the next requests, and passes draws
that have ended to `on_draw`, so that episodes advance, and are scored, while the model trains. The
caller's thread begins steps, takes them, and updates weights. Both use the engine under one lock.
Episodes play in the event loop, which never waits for that lock; another thread steps an
environment that blocks.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import TypeVar

import torch

from nemo_rl_core.distributed.event_loop import CallQueue, event_loop, run_on_loop
from nemo_rl_core.environments.conversations import conversations
from nemo_rl_core.environments.interfaces import EnvironmentInterface
from nemo_rl_core.errors import WorkerLostError
from nemo_rl_core.models.generation.streaming import KeptCompletion, RequestGeneration
from nemo_rl_core.rollouts.driver import play
from nemo_rl_core.rollouts.engine import (
    CompletionRequest,
    CompletionResult,
    Episode,
    RolloutIndex,
    SingleTurnEpisode,
    joined_requests,
    results_of,
)
from nemo_rl_core.rollouts.episode import PlayedEpisode, played_rollouts
from nemo_rl_core.rollouts.pending import (
    PendingRequest,
    PendingRollout,
    PendingStep,
    remote_rollouts,
)
from nemo_rl_core.rollouts.remote_rollouts import RemoteRollouts
from nemo_rl_core.types import Prompt, Rollout

_MAX_WAIT_SECONDS = 1.0
_TURN_WAIT_SECONDS = 0.02
"""Longest wait for a completion while other episodes may get ready for their next one."""
_TURN_POLL_SECONDS, _DRAW_POLL_SECONDS = 0.05, 0.25
"""Pauses before each poll while no caller waits: of turns that the environment answers, and of
single turns, which are only scored. The engine must be free to compute and to take new weights."""
_AWAITED_POLL_SECONDS = 0.001
"""Pause while a caller waits in `take`, so that it soon sees that the wait is over."""
CLOSE_SECONDS = 5.0
_MAX_RESTARTS_IN_A_ROW = 2
_FOREVER = float("inf")
T = TypeVar("T")
OnDraw = Callable[[int, Sequence[Rollout]], Sequence[Prompt] | None]
"""Takes a step's number and the rollouts of a draw; returns the prompts of the next draw."""


def no_more(step: int, rollouts: Sequence[Rollout]) -> None:
    """An `OnDraw` for steps that need no further draw."""


class RolloutStream(AbstractContextManager["RolloutStream"]):
    """Requests rollouts of upcoming steps from an engine, and returns them step by step.

    Steps are returned in order, and the rollouts of a step by group and sample, regardless of the
    order in which they finish. Timing therefore does not change the training data of a step; only
    the version of the weights that drew a token does, and the record has that version.

    A lost engine is restarted only in the caller's `begin`, `take` or `exclusive`: while the model
    trains, the weights that the engine had no longer exist.

    Args:
        generation: Engine that generates between calls, only for this stream.
        episode: Creates the rollout of a prompt and a `RolloutIndex`; with an environment, it also
            gets `answers`, the `conversations`.
        timeout_seconds: Seconds that `take` waits before it samples missing rollouts again, and
            again before they fail; None waits forever.
        on_draw: Called with the rollouts of each draw of a step as soon as all have ended, mostly
            in the stream's thread; returns the prompts of the step's next draw, or None if the step
            is complete, which is the default. There is one call at a time; the environment may
            run in parallel.
    """

    def __init__(
        self,
        generation: RequestGeneration,
        episode: Callable[..., Episode | SingleTurnEpisode],
        environment: EnvironmentInterface | None,
        *,
        seed: int,
        timeout_seconds: float | None = None,
        on_draw: OnDraw = no_more,
    ) -> None:
        self._generation = generation
        generation.keeps_completions = True
        # Guard the environment and `on_draw`. Locks are acquired in the order `_draw_lock`,
        # `_environment_lock`, `_lock`.
        self._environment_lock = threading.Lock()
        self._draw_lock = threading.Lock()
        self._calls = CallQueue(self._environment_lock)
        self._new_episode = episode
        if environment is not None:
            self._new_episode = partial(episode, answers=conversations(environment, self._calls))
        self._asking: list[PendingRequest] = []  # in the event loop
        self._ready: SimpleQueue[list[PendingRequest]] = SimpleQueue()  # to submit
        self._seed = seed
        self._timeout_seconds = timeout_seconds
        self._on_draw = on_draw
        self._request_ids = count()
        self._steps: dict[int, PendingStep] = {}
        self._in_flight: dict[int, PendingRequest] = {}
        self._num_restarts = generation.num_restarts
        self._num_restarts_in_a_row = 0
        # Guards the engine, all attributes above, and the four below.
        self._lock = threading.Condition()
        self._deadline: float | None = None  # until which a caller waits in `take`
        self._polls_next = False  # the thread polls without a pause
        self._lost: WorkerLostError | None = None  # an engine that is not restarted yet
        self._failure: BaseException | None = None  # of the thread
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._guarded, args=(each,), name="rollouts", daemon=True)
            for each in (self._run, self._calls.serve)
        ]
        for thread in self._threads:
            thread.start()

    def begin(
        self,
        prompts: Sequence[Prompt],
        *,
        num_generations_per_prompt: int,
        step: int,
        first_group: int = 0,
        next_version: int | None = None,
    ) -> None:
        """Submits a step's rollouts and returns at once.

        Args:
            first_group: Index of the first prompt.
            next_version: Version of the weights that the rollouts begin with, which the caller
                sends to the engine next. That call then restarts a lost engine, not this one.
        """
        may_restart = next_version is None
        with self._lock:
            self._resubmit_after_restart(may_restart=may_restart)
            self._steps[step] = PendingStep(num_generations_per_prompt, first_group)
            self._begin_draw(
                step, prompts, may_restart=may_restart, first_version=next_version or 0
            )
            self._lock.notify_all()

    def _begin_draw(
        self, step: int, prompts: Sequence[Prompt], *, may_restart: bool, first_version: int = 0
    ) -> None:
        """Submits further rollouts of a step, whose groups follow those of its earlier draws."""
        pending = self._steps[step]
        requested = [
            (prompt, RolloutIndex(self._seed, step, group, sample))
            for group, prompt in enumerate(prompts, start=pending.num_prompts)
            for sample in range(pending.num_generations_per_prompt)
        ]
        pending.num_prompts += len(prompts)
        pending.draw = [PendingRollout(*each, first_version) for each in requested]
        self._start(pending.draw, may_restart=may_restart)

    def _start(self, rollouts: Sequence[PendingRollout], *, may_restart: bool) -> None:
        """Starts rollouts; returns when their first requests are submitted."""
        playing = []
        for each in rollouts:
            episode = self._new_episode(*each.requested)
            if isinstance(episode, SingleTurnEpisode):
                self._ready.put([PendingRequest(each, episode.request())])
            else:
                playing.append((each, episode))
        if playing:
            run_on_loop(self._play(playing))
        self._submit_ready(may_restart=may_restart)

    async def _play(self, playing: Sequence[tuple[PendingRollout, Episode]]) -> None:
        """Begins to play; returns when episodes that need nothing else have asked the engine."""
        for pending, episode in playing:
            if pending.playing is not None:
                pending.playing.cancel()
            complete = partial(self._complete, pending)
            pending.playing = asyncio.create_task(play(pending.prompt, episode, complete))
            pending.playing.add_done_callback(partial(self._end, pending))
        await asyncio.sleep(0)  # they ask
        await asyncio.sleep(0)  # and are passed on

    async def _complete(
        self, pending: PendingRollout, request: CompletionRequest
    ) -> CompletionResult:
        answer: asyncio.Future[CompletionResult] = asyncio.get_running_loop().create_future()
        if not self._asking:
            answer.get_loop().call_soon(self._pass_on)  # with those of all that can advance now
        self._asking.append(PendingRequest(pending, request, answer))
        return await answer

    def _pass_on(self) -> None:
        self._ready.put(self._asking)
        self._asking = []
        self._wake_thread()

    def _end(
        self, pending: PendingRollout, playing: "asyncio.Task[Sequence[PlayedEpisode]]"
    ) -> None:
        if playing is not pending.playing or playing.cancelled():
            return
        self._failure = playing.exception() or self._failure
        pending.samples = None if playing.exception() else playing.result()
        self._wake_thread()

    def _wake_thread(self) -> None:
        """Wakes the thread, unless the lock is taken: the thread then looks when it is free."""
        if self._lock.acquire(blocking=False):
            self._lock.notify_all()
            self._lock.release()

    def poll_soon(self) -> None:
        """Makes the thread poll now, for a caller that will take a step soon; returns at once.

        Rollouts that have ended since the last poll are then processed in parallel to the caller.
        """
        with self._lock:
            self._polls_next = self._must_poll()
            self._lock.notify_all()

    def take(self, step: int) -> Sequence[Rollout]:
        """Waits until a step needs no further draw; later steps continue.

        Returns:
            All rollouts that were begun, by group and sample; one that never arrived has an error.

        Raises:
            WorkerLostError: If the engine's worker is lost repeatedly before it completes anything.
            Exception: If `on_draw` has raised it for this step.
        """
        with self._lock:
            self._resubmit_after_restart(may_restart=True)  # and completions that were kept
            pending = self._steps[step]
        try:
            while not self._wait_until_drawn(pending):
                self._end_draws()
        finally:
            with self._lock:
                self._deadline = None
                _cancel(self._steps.pop(step).draw)
        if pending.failure is not None:
            raise pending.failure
        return RemoteRollouts.joined(pending.drawn)

    def _played_rollouts(
        self, draw: Sequence[PendingRollout], *, may_restart: bool
    ) -> RemoteRollouts | None:
        """Returns the rollouts of a draw that has ended.

        Returns None if an engine is lost with completions that it kept, which then start again.
        """
        if any(each.playing is not None for each in draw):
            return played_rollouts(
                [each.requested for each in draw], [each.played() for each in draw]
            )
        kept = dict(each.kept for each in draw if each.kept is not None)
        completions = self._call_engine(
            partial(self._generation.take_remotely, kept), may_restart=may_restart
        )
        return None if completions is None else remote_rollouts(draw, completions)

    def _wait_until_drawn(self, pending: PendingStep) -> bool:
        """Waits until a step needs no further draw; each draw has a separate deadline.

        Returns:
            False if a draw has ended that the stream's thread did not process, because it waits
            for a reward or for the environment.
        """
        with self._lock:
            draw, self._deadline = pending.draw, self._new_deadline()
            self._lock.notify_all()
            while not pending.is_drawn:
                if self._failure is not None:
                    raise self._failure
                seconds_left = self._deadline - time.monotonic()
                if seconds_left > 0 and pending.draw is draw:
                    self._lock.wait(min(seconds_left, _MAX_WAIT_SECONDS))
                    continue
                if seconds_left <= 0 and pending.missing:
                    self._poll()  # the thread does not while it scores another step's draw
                    self._retry(pending.missing)
                    if pending.has_ended_draw:
                        return False
                draw, self._deadline = pending.draw, self._new_deadline()
            return True

    @contextmanager
    def exclusive(self) -> Generator[None]:
        """Locks the engine, for new weights or a restart."""
        with self._lock:
            yield

    @contextmanager
    def environment_alone(self) -> Generator[None]:
        """Waits until a step of the environment under way returns, and blocks further ones."""
        with self._environment_lock:
            yield

    def close(self) -> None:
        """Ends the thread and drops all requests; the engine's next user cancels them.

        Waits only some seconds for an environment, or an engine, that hangs.
        """
        self._is_closed = True
        if self._lock.acquire(timeout=CLOSE_SECONDS):
            for step in self._steps.values():
                _cancel(step.draw)
            self._lock.notify_all()
            self._lock.release()
        self._calls.stop()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        """Polls the engine, submits the next turns and ends draws, in the thread."""
        while True:
            with self._lock:
                while not (self._is_closed or self._must_poll()):
                    self._lock.wait()
                if self._deadline is None:
                    self._pause()
                else:
                    self._lock.wait(_AWAITED_POLL_SECONDS)
                self._polls_next = False
                if self._is_closed:
                    return
                self._poll()
            self._end_draws()
            with self._lock:
                self._lock.notify_all()

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        # Broad on purpose: an exception in a thread would be lost, a `SystemExit` of a user's hook
        # even silently; `take` raises it.
        except BaseException as error:  # noqa: BLE001 (raised by take)
            with self._lock:
                self._failure = error
                self._lock.notify_all()

    def _pause(self) -> None:
        """Waits for the next poll, or for a draw that ends; submits the turns that are ready."""
        end = time.monotonic() + (_TURN_POLL_SECONDS if self._plays else _DRAW_POLL_SECONDS)
        while not self._is_urgent() and (seconds := end - time.monotonic()) > 0:
            self._lock.wait_for(lambda: self._is_urgent() or not self._ready.empty(), seconds)
            self._submit_ready(may_restart=False)

    @property
    def _plays(self) -> bool:
        return any(each.playing for step in self._steps.values() for each in step.draw[:1])

    def _is_urgent(self) -> bool:
        is_asked = self._polls_next or self._deadline is not None
        return self._is_closed or is_asked or bool(self._ended_draws())

    def _must_poll(self) -> bool:
        """Whether rollouts are under way; not while the engine is lost and no caller waits."""
        is_awaited = self._deadline is not None
        has_draws = any(step.draw for step in self._steps.values())
        return has_draws and (is_awaited or self._lost is None)

    def _ended_draws(self) -> list[int]:
        """Returns the steps whose draw has ended and was not passed to `on_draw` yet."""
        return [step for step, pending in self._steps.items() if pending.has_ended_draw]

    def _end_draws(self) -> None:
        """Passes draws that have ended to `on_draw`, and begins the next draws."""
        with self._lock:
            ended = self._ended_draws()
        for step in ended:
            with self._lock:
                may_restart = self._deadline is not None
                # A restarted engine has kept no completions.
                self._resubmit_after_restart(may_restart=may_restart)
                pending = self._steps.get(step)
                if self._is_closed or pending is None or not pending.has_ended_draw:
                    continue  # its caller has left, or an engine was lost with the draw
                rollouts = self._played_rollouts(pending.draw, may_restart=may_restart)
                if rollouts is None:
                    continue
                pending.drawn.append(rollouts)
                pending.draw = []
            next_prompts = None
            try:
                with self._draw_lock:
                    next_prompts = self._on_draw(step, rollouts)
            # Broad on purpose: `take` raises the error for its step.
            except Exception as error:  # noqa: BLE001 (raised by take)
                pending.failure = error
            with self._lock:
                if next_prompts is not None and step in self._steps:
                    self._begin_draw(step, next_prompts, may_restart=self._deadline is not None)
                else:
                    pending.is_drawn = True

    def _poll(self) -> None:
        """Submits requests that are ready, and gives new completions to their episodes."""
        may_restart = self._deadline is not None
        self._submit_ready(may_restart=may_restart)
        if not self._in_flight:
            return
        wait_seconds = 0.0
        if self._deadline is not None:
            wait_seconds = max(0.0, min(self._deadline - time.monotonic(), _MAX_WAIT_SECONDS))
            if self._plays:
                wait_seconds = min(wait_seconds, _TURN_WAIT_SECONDS)
        answers = self._call_engine(
            lambda: self._generation.poll(wait_seconds=wait_seconds), may_restart=may_restart
        )
        turns = {}
        for request_id, made in answers or []:
            pending = self._in_flight.get(request_id)
            if pending is None:
                continue  # cancelled, but finished at the same time
            self._num_restarts_in_a_row = 0
            assert isinstance(made, KeptCompletion)
            if pending.answer is not None:
                turns[request_id] = made
                continue
            del self._in_flight[request_id]
            pending.rollout.kept = request_id, made
        self._take_turns(turns)

    def _take_turns(self, kept: dict[int, KeptCompletion]) -> None:
        """Makes engines put turns into the object store, and gives these to their episodes.

        The turns of a lost engine stay under way and are requested again.
        """
        if not kept:
            return
        requests = {each: self._in_flight[each].request for each in kept}
        before = {key: each.before.row for key, each in requests.items() if each.before}
        completions = self._call_engine(
            partial(self._generation.take_remotely, kept, before),
            may_restart=self._deadline is not None,
        )
        if completions is None:
            return
        answered = [self._in_flight.pop(each).answer for each in kept]
        pairs = list(zip(answered, results_of(completions), strict=True))
        event_loop().call_soon_threadsafe(_answer, pairs)

    def _submit_ready(self, *, may_restart: bool) -> None:
        ready: list[PendingRequest] = []
        while not self._ready.empty():
            ready += self._ready.get()
        live = [each for each in ready if each.answer is None or not each.answer.cancelled()]
        self._submit(live, may_restart=may_restart)

    def _submit(self, pending: Sequence[PendingRequest], *, may_restart: bool) -> None:
        # The engine's next user counts request ids from 0 as well: after a slow reward or
        # environment, a closed stream must not submit requests with the same ids.
        if self._is_closed:
            return
        for version in dict.fromkeys(each.rollout.first_version for each in pending):
            group = [each for each in pending if each.rollout.first_version == version]
            request_ids = [next(self._request_ids) for _ in group]
            self._in_flight.update(zip(request_ids, group, strict=True))
            requests = joined_requests([each.request for each in group]).batch()
            # Later turns and further draws come before the requests of later steps.
            requests["priorities"] = torch.tensor([each.rollout.index.step for each in group])
            submit = partial(self._generation.submit, request_ids, requests, first_version=version)
            self._call_engine(submit, may_restart=may_restart)

    def _call_engine(self, call: Callable[[], T], *, may_restart: bool) -> T | None:
        """Calls the engine; returns None if its worker is lost.

        The worker is then restarted now or, without `may_restart`, by the next call that may.
        """
        returned = None
        try:
            returned = call()
        except WorkerLostError as lost:
            if not may_restart:
                self._lost = lost
                return None
            if self._num_restarts_in_a_row == _MAX_RESTARTS_IN_A_ROW:
                raise
            self._num_restarts_in_a_row += 1
            self._generation.restart(lost)
        self._resubmit_after_restart(may_restart=may_restart)
        return returned

    def _resubmit_after_restart(self, *, may_restart: bool) -> None:
        """Submits all requests again if the worker is new."""
        is_new = self._generation.num_restarts > self._num_restarts
        if may_restart and self._lost is not None and not is_new:
            # The worker is alive, but was unreachable for one call that may have lost completions.
            self._generation.restart(self._lost)
        if self._generation.num_restarts > self._num_restarts:
            self._num_restarts, self._lost = self._generation.num_restarts, None
            unanswered = list(self._in_flight.values())
            self._in_flight.clear()
            draws = [each for step in self._steps.values() for each in step.draw]
            kept = [each for each in draws if each.kept is not None]
            for each in kept:
                each.kept = None
            self._submit(unanswered, may_restart=may_restart)
            self._start(kept, may_restart=may_restart)

    def _retry(self, missing: Sequence[PendingRollout]) -> None:
        """Samples rollouts again from their first token; fails them after the second attempt."""
        late = set(missing)
        stuck = [key for key, each in self._in_flight.items() if each.rollout in late]
        for request_id in stuck:
            del self._in_flight[request_id]
        self._call_engine(lambda: self._generation.cancel(stuck), may_restart=True)
        for each in missing:
            if each.num_attempts > 1:
                each.failure = f"no answer within {self._timeout_seconds:g} s, twice"
            else:
                each.num_attempts += 1
        self._start([each for each in missing if each.failure is None], may_restart=True)

    def _new_deadline(self) -> float:
        return time.monotonic() + (self._timeout_seconds or _FOREVER)


def _cancel(rollouts: Sequence[PendingRollout]) -> None:
    for each in rollouts:
        if each.playing is not None:
            event_loop().call_soon_threadsafe(each.playing.cancel)


def _answer(
    pairs: "Sequence[tuple[asyncio.Future[CompletionResult] | None, CompletionResult]]",
) -> None:
    for answer, result in pairs:
        if answer is not None and not answer.done():  # cancelled
            answer.set_result(result)
